"""Authorities and certificates for tests, on elliptic curves so that they are made at once."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs; its own certificate lies in `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = _named(f"{name} authority")
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(self._name, self._name, self._key.public_key())
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = made.add_extension(_SIGNS, critical=True).add_extension(self._key_identifier(), critical=False)
        self.ca = folder / f"{name}-ca.pem"
        self.ca.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *hosts: str, password: bytes | None = None, hours: float = 1.0) -> Pair:
        """A certificate for these hosts; without any, for 127.0.0.1 and localhost. Files of the name are replaced.

        `hours`: from now until it expires; it was valid an hour ago.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(_named(name), self._name, key.public_key(), hours)
        alternatives = [_host(each) for each in hosts or ("127.0.0.1", "localhost")]
        made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        made = made.add_extension(self._key_identifier(), critical=False)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}-key.pem")
        pair.cert.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        pair.key.write_bytes(key.private_bytes(*form, hidden))
        return pair

    def _key_identifier(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())


# Clients on Python 3.13 require it of an authority, and the identifiers of keys.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, hours: float = 1.0
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    return made.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=hours))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    return x509.IPAddress(ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
