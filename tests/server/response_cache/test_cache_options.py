"""Options of `--cache-config`."""

from __future__ import annotations

import pytest

from neso.server.cache_options import CacheConfig, RedisOptions
from neso.server.errors import ServerError
from neso.server.options import ServerOptions


@pytest.mark.parametrize(
    ("settings", "byte_size", "expected"),
    [
        ([], None, CacheConfig()),
        ([], 7, CacheConfig(7)),
        (["local,size=5"], None, CacheConfig(5)),
        (["redis,host=a", "redis,port=1"], None, CacheConfig(redis=RedisOptions("a", 1))),
        (["redis,host=a,port=1"], None, CacheConfig(redis=RedisOptions("a", 1))),
        (
            ["redis,host=a,port=1,user=u,password=p,q=r,db=2", "redis,socket_timeout=0", "redis,pool_size=3"],
            None,
            CacheConfig(
                redis=RedisOptions("a", 1, user="u", password="p,q=r", db=2, socket_timeout=0, pool_size=3)
            ),
        ),
        (
            ["redis,host=a,port=1,cert=c.pem,key=k.pem,cacert=ca.pem,cacert_dir=/d,sni=n,tls_enabled=true"],
            None,
            CacheConfig(
                redis=RedisOptions(
                    "a",
                    1,
                    cert="c.pem",
                    key="k.pem",
                    cacert="ca.pem",
                    cacert_dir="/d",
                    sni="n",
                    tls_enabled=True,
                )
            ),
        ),
    ],
)
def test_valid_options(settings, byte_size, expected):
    assert CacheConfig.parse(settings, byte_size) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["memcached,host=a"], "there is no cache 'memcached', only local and redis"),
        (["local"], "'local,…': expected local,KEY=VALUE with a KEY of size"),
        (["local,size=1G"], "'local,size=1G': expected a number"),
        (["local,size=-1"], "expected a number"),
        (["redis,host=a"], "'port' is missing, expected redis,host=HOST and redis,port=PORT"),
        (["redis,port=1"], "'host' is missing"),
        (["redis,host=a,port=70000"], "a port of 1 to 65535, got 'a' and 70000"),
        (["redis,host=,port=1"], "needs a host"),
        (["redis,host=a,port=x"], "'redis,port=x': expected a number"),
        (["redis,hots=a"], "'redis,hots…': expected redis,KEY=VALUE with a KEY of host, port, user"),
        (["redis,host=a,port=1,tls_enabled=maybe"], "expected true or false"),
        (["redis,host=a,port=1,cert=c.pem"], "both cert and key"),
        (["redis,host=a,port=1,pool_size=0"], "pool_size of the redis cache must be at least 1"),
        (
            ["local,size=1", "redis,host=a,port=1"],
            "multiple cache configurations, expected one, got local and redis",
        ),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(ServerError) as raised:
        CacheConfig.parse(settings)
    assert message in raised.value.message


def test_sizes_in_two_places():
    with pytest.raises(ServerError, match="cannot be given together"):
        CacheConfig.parse(["local,size=1"], 1)


def test_credentials_from_the_environment():
    environment = {"TRITONCACHE_REDIS_USERNAME": "u", "TRITONCACHE_REDIS_PASSWORD": "secret"}
    options = RedisOptions.from_settings({"host": "a", "port": "1"}, environment)
    assert (options.user, options.password) == ("u", "secret")
    assert RedisOptions.from_settings({"host": "a", "port": "1", "user": "v"}, environment).user == "v"
    assert "secret" not in repr(options)


def test_only_one_cache_is_allowed():
    with pytest.raises(ServerError, match="in memory or in Redis, not both"):
        ServerOptions(response_cache_size=1, redis_cache=RedisOptions("a", 1))
