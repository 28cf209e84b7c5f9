"""Certificates: who may speak in a run. TLS with authentication of both sides, or nothing.

A run has one authority, a directory made by `archipel certs DIR` or by the site's own tools:

    ca.pem   ca.key         the authority; its key is needed only to issue, keep it off the workers
    syncer.pem  syncer.key  names the hosts it listens on; accepted from a listening worker
    learner.pem  learner.key, or NAME.pem  NAME.key for a worker of its own
    peer.pem  peer.key      of gossip: peers and the rendezvous both listen and dial; names their hosts

Whoever holds a certificate of the authority may join under any worker name: certificates keep strangers out,
they do not tell members apart. Files are read again for every connection, so certificates rotate without a
restart: issue new ones into the same directory. Private keys are written with mode 0600.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from archipel.errors import SecurityError

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 825  # longer than any run; what browsers and auditors accept
CLOCK_SKEW = datetime.timedelta(
    days=1
)  # a worker whose clock is behind must not find a certificate "not yet valid"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
HOST_NAME = re.compile(rf"(\*\.)?({_LABEL}\.)*(?!\d+$){_LABEL}")  # one that ends in a number was an address


@dataclass(frozen=True)
class Security:
    """Where one worker finds the authority's certificate, its own, and the key to its own."""

    ca: Path
    cert: Path
    key: Path

    def check(self) -> None:
        """Raise SecurityError, with the remedy, if a connection made with these files would fail."""
        self._read()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for listening: clients must show a certificate of the authority."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._rotated, require_client_authentication=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for one connection, from the files as they are. SecurityError if unusable."""
        ca, cert, key = self._read()
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        ca, cert, key = self._read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def _rotated(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            return self._configuration()
        except SecurityError:
            return None  # half-way through a rotation, or expired: gRPC goes on with the pair it has

    def _read(self) -> tuple[bytes, bytes, bytes]:
        """Return the bytes of ca, certificate and key, checked to fit together and to be valid now."""
        ca, cert, key = (_bytes(path) for path in (self.ca, self.cert, self.key))
        authority, own = _certificate(self.ca, ca), _certificate(self.cert, cert)
        for path, certificate in ((self.ca, authority), (self.cert, own)):
            _require_valid_now(path, certificate)
        try:
            own.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            remedy = f"issue both with one `archipel certs {self.ca.parent}`"
            raise SecurityError(
                f"{self.cert} was not issued by the authority in {self.ca}: {remedy}"
            ) from None
        if _public_bytes(_private_key(self.key, key)) != _public_bytes(own):
            raise SecurityError(f"{self.key} is not the key of {self.cert}: copy the pair again")
        return ca, cert, key


def load(directory: str | os.PathLike[str], role: str) -> Security:
    """Return what `role` ("syncer", "learner" or a worker name) needs from an authority's directory.

    SecurityError names the file that is missing, expired or foreign, and the remedy.
    """
    folder = Path(directory)
    if not role or role == "ca" or Path(role).name != role:
        raise SecurityError(
            f"{role!r} cannot have a certificate: use syncer, learner or a worker name without slashes"
        )
    security = Security(folder / "ca.pem", folder / f"{role}.pem", folder / f"{role}.key")
    security.check()
    return security


def make_authority(
    directory: str | os.PathLike[str], hosts: Iterable[str] = (), workers: Iterable[str] = ()
) -> list[Path]:
    """Make an authority for tests and small fleets, and return the files written.

    hosts: names and addresses syncer and peers are reached by, beside localhost. workers: names with
    certificates of their own, beside the shared ones. An authority that is there is kept and issues new
    certificates, for the hosts of the old ones too: so they are rotated. Elliptic-curve keys (P-256). Valid
    for 10 years (authority), 825 days.
    """
    folder = Path(directory)
    names = [_general_name(host) for host in (*LOCAL_HOSTS, *hosts)]
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if not (folder / "ca.key").exists():
        if (folder / "ca.pem").exists():
            remedy = "run this where the authority's key is, or in an empty directory for a new authority"
            raise SecurityError(f"{folder} has an authority's certificate but not its key: {remedy}")
        written += _make_root(folder)
    for name in dict.fromkeys(("syncer", "learner", "peer", *workers)):
        held = [*names, *_names_in(folder / f"{name}.pem")] if name in ("syncer", "peer") else []
        written += _issue(folder, name, list(dict.fromkeys(held)))
    return written


def _names_in(path: Path) -> list[x509.GeneralName]:
    """Return the hosts that the certificate at `path` names; none where there is none."""
    if not path.exists():
        return []
    try:
        found = x509.load_pem_x509_certificate(_bytes(path))
        return list(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []
    except ValueError:
        raise SecurityError(
            f"{path} is damaged, and the hosts it named are lost: remove it and give each with --host"
        ) from None


def warn_if_open(listen: str, security: Security | None) -> str | None:
    """Return a warning if strangers could reach `listen` without showing a certificate, else None."""
    host = listen.rpartition(":")[0].strip("[]")
    if security is not None or host == "localhost" or host.startswith("unix:") or _is_loopback(host):
        return None
    return (
        f"listening on {listen} without TLS: whoever reaches this port can read and change the weights; "
        "run `archipel certs DIR` and give every worker `--tls DIR`, or listen on 127.0.0.1"
    )


def explain(details: str, *, secured: bool) -> str | None:
    """Return what a failed connection's text says about certificates, with the remedy, or None if nothing."""
    text = details.lower()
    if "not in peer certificate" in text or "hostname verification" in text:
        return (
            f"the server's certificate does not name the address we dialled ({details}): issue it with "
            "`archipel certs DIR --host NAME` and copy syncer.pem and syncer.key to the server"
        )
    if "certificate has expired" in text or "certificate_expired" in text:
        return (
            f"a certificate has expired ({details}): issue new ones with `archipel certs DIR` and copy them"
        )
    if "unsupported certificate purpose" in text:
        return f"the server's certificate is not for serving ({details}): give it syncer.pem and syncer.key"
    if "certificate_verify_failed" in text:
        return (
            f"the server's certificate is not of our authority ({details}): copy one DIR of "
            "`archipel certs DIR` to all workers of the run"
        )
    if "ssl_error_ssl" in text or "tls handshake" in text:
        return f"TLS failed ({details}): do both sides use --tls, with files of one authority?"
    if "socket closed" not in text and "connection reset" not in text:
        return None
    if secured:
        return f"the server hung up ({details}): is our certificate of its authority? copy its DIR here"
    return f"the server hung up on a plain connection ({details}): if it uses TLS, give --tls DIR here too"


def _make_root(folder: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"archipel authority {os.urandom(4).hex()}")])
    builder = (
        _builder(key.public_key(), name, name, days=AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _write_pair(folder, "ca", builder.sign(key, hashes.SHA256()), key)


def _issue(folder: Path, name: str, hosts: list[x509.GeneralName]) -> list[Path]:
    """Write a certificate for `name`. With hosts it may serve; every one may connect."""
    authority = _certificate(folder / "ca.pem", _bytes(folder / "ca.pem"))
    authority_key = _private_key(folder / "ca.key", _bytes(folder / "ca.key"))
    if not name or name == "ca" or Path(name).name != name:
        raise SecurityError(
            f"{name!r} cannot have a certificate: use a worker name without slashes, not 'ca'"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        _builder(key.public_key(), subject, authority.subject, days=CERTIFICATE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_authority_identifier(authority), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return _write_pair(folder, name, builder.sign(authority_key, hashes.SHA256()), key)


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_identifier(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    key = authority.public_key()  # of any kind: a site's own authority may well use RSA
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key)  # type: ignore[arg-type]


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if len(host) > 253 or not HOST_NAME.fullmatch(host):
        raise SecurityError(
            f"{host!r} is neither an IP address nor an ASCII host name: give it as in syncer.example.org or "
            "10.0.0.1, without scheme and port"
        )
    return x509.DNSName(host)


def _write_pair(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key_path, cert_path = folder / f"{name}.key", folder / f"{name}.pem"
    _replace(key_path, pem, mode=0o600)
    _replace(cert_path, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return [cert_path, key_path]


def _replace(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file so that a reader sees old or new content, and others never see a key."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        remedy = f"make one with `archipel certs {path.parent}` or copy it from where the authority is"
        raise SecurityError(f"{path} does not exist: {remedy}") from None
    except OSError as error:
        raise SecurityError(f"{path} cannot be read: {error.strerror}") from None


def _certificate(path: Path, pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise SecurityError(f"{path} is not a PEM certificate: copy it again") from None


def _private_key(path: Path, pem: bytes) -> CertificateIssuerPrivateKeyTypes:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise SecurityError(f"{path} is not an unencrypted PEM private key: copy it again") from None
    return key  # type: ignore[return-value]


def _public_bytes(holder: x509.Certificate | CertificateIssuerPrivateKeyTypes) -> bytes:
    return holder.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _require_valid_now(path: Path, certificate: x509.Certificate) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        remedy = f"issue a new one with `archipel certs {path.parent}`"
        if path.name == "ca.pem":
            remedy = (
                f"remove ca.pem and ca.key, run `archipel certs {path.parent}`, copy the files to all workers"
            )
        raise SecurityError(f"{path} has expired on {certificate.not_valid_after_utc:%Y-%m-%d}: {remedy}")
    if now < certificate.not_valid_before_utc:
        since = f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise SecurityError(f"{path} is valid only from {since}: is this machine's clock right?")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
