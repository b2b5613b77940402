"""TLS certificates and restricted API groups."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tritonclient.grpc import service_pb2

from neso.frontends.kserve.grpc_frontend import GROUPS as RPC_GROUPS
from neso.frontends.kserve.http_frontend import routes
from neso.frontends.kserve.service import KServeService
from neso.frontends.security import GROUPS, Restrictions, TlsFiles
from neso.server.core import Core
from neso.server.errors import InvalidArgument
from neso.server.options import ServerOptions


def test_groups_share_a_header():
    restrictions = Restrictions.parse(["health,metadata:Admin-Key=a=b:c", "inference:user=x"])
    assert restrictions.get("health") == restrictions.get("metadata")
    required = restrictions.get("health")
    assert required is not None and required.name == "admin-key"
    assert required.matches(b"a=b:c")
    assert not required.matches(b"a=b") and not required.matches(None) and not required.matches(b"")
    assert restrictions.get("inference") != required
    assert restrictions.get("logging") is None


def test_nothing_is_restricted_by_default():
    assert not Restrictions() and not Restrictions.parse([])
    assert all(Restrictions().get(group) is None for group in GROUPS)


def test_secret_is_not_in_repr_or_errors():
    restrictions = Restrictions.parse(["health:key=secret"])
    assert "secret" not in repr(restrictions.get("health"))
    for bad in ("health;key=secret", "nothing:key=secret"):
        with pytest.raises(InvalidArgument) as caught:
            Restrictions.parse([bad])
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["health"], "expected GROUP"),
        (["health:key"], "expected GROUP"),
        (["health:=value"], "expected GROUP"),
        (["health:key="], "expected GROUP"),
        ([":key=value"], "expected GROUP"),
        (["weather:key=value"], "unknown restricted group 'weather', expected one of: health, metadata"),
        (["health,:key=value"], "unknown restricted group ''"),
        (
            ["health:a=b", "metadata,health:c=d"],
            "restricted group 'health' can not be specified more than once",
        ),
        (["health,health:a=b"], "restricted group 'health' can not be specified more than once"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(InvalidArgument, match=message):
        Restrictions.parse(settings)


def test_every_rpc_has_a_group():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert {method.name for method in service.methods} | {"Check"} == set(RPC_GROUPS)
    assert set(RPC_GROUPS.values()) == set(GROUPS)


@pytest.mark.parametrize(
    ("pattern", "group"),
    [
        ("/v2", "metadata"),
        ("/v2/models/{model}", "metadata"),
        ("/v2/models/{model}/versions/{version:digits}", "metadata"),
        ("/v2/health/live", "health"),
        ("/v2/models/{model}/ready", "health"),
        ("/v2/models/{model}/versions/{version:digits}/infer", "inference"),
        ("/v2/models/{model}/generate_stream", "inference"),
        ("/v2/models/{model}/config", "model-config"),
        ("/v2/models/stats", "statistics"),
        ("/v2/repository/index", "model-repository"),
        ("/v2/repository/{repository}/models/{model}/load", "model-repository"),
        ("/v2/cudasharedmemory/region/{region}/register", "shared-memory"),
        ("/v2/systemsharedmemory/status", "shared-memory"),
        ("/v2/trace/setting", "trace"),
        ("/v2/models/{model}/trace/setting", "trace"),
        ("/v2/logging", "logging"),
    ],
)
def test_group_of_a_route(tmp_path, pattern, group):
    table = routes(KServeService(Core(ServerOptions(model_repository=(tmp_path,)))), 0, 0)
    assert {route.group for route in table if route.pattern == pattern} == {group}


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem, key.pem, ca.pem, other.pem (a different key), encrypted.pem and junk.pem."""
    folder = tmp_path_factory.mktemp("pem")
    ca = trustme.CA()
    certificate, other = ca.issue_cert("localhost"), ca.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    other.private_key_pem.write_to_path(folder / "other.pem")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    secret = BestAvailableEncryption(b"secret")
    (folder / "encrypted.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, secret)
    )
    (folder / "junk.pem").write_text("junk")
    return folder


def test_valid_files(pem):
    context = TlsFiles(pem / "cert.pem", pem / "key.pem").context("http/1.1")
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    mutual = TlsFiles(pem / "cert.pem", pem / "key.pem", pem / "ca.pem")
    assert mutual.context("h2").verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("certificate", "key", "root", "message"),
    [
        ("none.pem", "key.pem", None, "the TLS certificate '.*none.pem' cannot be read: No such file"),
        ("cert.pem", "none.pem", None, "the TLS key '.*none.pem' cannot be read: No such file"),
        ("cert.pem", "key.pem", "none.pem", "the TLS root certificate '.*none.pem' cannot be read"),
        (".", "key.pem", None, "cannot be read: Is a directory"),
        (
            "junk.pem",
            "key.pem",
            None,
            "'.*junk.pem' and the key '.*key.pem' do not match, or one of them",
        ),
        ("cert.pem", "other.pem", None, "do not match.*: KEY_VALUES_MISMATCH"),
        ("cert.pem", "encrypted.pem", None, "the TLS key '.*encrypted.pem' cannot be used: it is encrypted"),
        ("cert.pem", "key.pem", "junk.pem", "the TLS root certificate '.*junk.pem' is not a PEM file"),
    ],
)
def test_errors_name_the_invalid_file(pem, certificate, key, root, message):
    files = TlsFiles(pem / certificate, pem / key, pem / root if root else None)
    with pytest.raises(InvalidArgument, match=message):
        files.context("http/1.1")
