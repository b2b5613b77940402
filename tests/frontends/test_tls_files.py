"""TLS certificate and key files."""

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

from neso.frontends.security import TlsFiles
from neso.server.errors import InvalidArgument


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
