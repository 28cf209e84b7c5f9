"""Certificates: what is issued, what is refused at load, and who gets into a running server."""

import datetime
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from archipel.errors import SecurityError
from archipel.protocol.messages import PROTOCOL_VERSION
from archipel.runtime import security, wire
from archipel.runtime.security import Security, load, make_authority, warn_if_open
from archipel.runtime.transport import Client, NetworkOptions, Server

DEADLINE_S = 15.0
OPTIONS = NetworkOptions(backoff_s_min=0.02, backoff_s_max=0.1)


class Ears:
    """A sink for either end that remembers only what these tests ask for."""

    def __init__(self) -> None:
        self.joined = threading.Event()
        self.left = threading.Event()
        self.turned_away = threading.Event()
        self.reason = ""
        self.final = False

    def connected(self, *who: str) -> None:
        self.joined.set()

    def disconnected(self, *who_and_reason: str) -> None:
        self.left.set()

    def refused(self, reason: str, final: bool) -> None:
        self.reason, self.final = reason, final
        self.turned_away.set()

    def received(self, *what: Any) -> None: ...

    def allocate(self, *what: Any) -> memoryview:
        return memoryview(bytearray(what[-1]))

    def sent(self, *what: Any) -> None: ...


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder, hosts=["syncer.example", "10.1.2.3"], workers=["island-7"])
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    make_authority(folder)
    return folder


@contextmanager
def serving(credentials: Security | None, listen: str = "127.0.0.1:0") -> Iterator[tuple[Ears, str]]:
    ears = Ears()
    server = Server(ears, OPTIONS, listen=listen, run="run", security=credentials)
    address = server.start()
    try:
        yield ears, address
    finally:
        server.stop(grace_s=0.2)


@contextmanager
def joining(address: str, credentials: Security | None) -> Iterator[Ears]:
    ears = Ears()
    client = Client(ears, OPTIONS, address=address, worker="w", run="run", security=credentials)
    client.start()
    try:
        yield ears
    finally:
        client.stop(grace_s=0.2)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


# ---- what is issued ----


def test_keys_are_readable_by_their_owner_only(authority: Path) -> None:
    keys = sorted(path.name for path in authority.glob("*.key"))
    assert keys == ["ca.key", "island-7.key", "learner.key", "peer.key", "syncer.key"]
    assert {stat.S_IMODE((authority / key).stat().st_mode) for key in keys} == {0o600}
    assert not list(authority.glob(".*"))


def test_the_syncer_is_named_by_every_host_given_and_by_localhost(authority: Path) -> None:
    names = certificate(authority / "syncer.pem").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert names.value.get_values_for_type(x509.DNSName) == ["localhost", "syncer.example"]
    addresses = names.value.get_values_for_type(x509.IPAddress)
    assert [str(address) for address in addresses] == ["127.0.0.1", "::1", "10.1.2.3"]


@pytest.mark.parametrize(("role", "serves"), [("syncer", True), ("learner", False), ("island-7", False)])
def test_only_the_syncer_may_serve(role: str, serves: bool, authority: Path) -> None:
    uses = (
        certificate(authority / f"{role}.pem").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    )
    assert ExtendedKeyUsageOID.CLIENT_AUTH in uses
    assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) is serves
    load(authority, role)


def test_issuing_again_keeps_the_authority_and_changes_the_certificates(tmp_path: Path) -> None:
    make_authority(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    written = {path.name for path in make_authority(tmp_path)}
    changed = {path.name for path in tmp_path.iterdir() if before.get(path.name) != path.read_bytes()}
    assert (
        changed
        == written
        == {f"{name}.{end}" for name in ("syncer", "learner", "peer") for end in ("pem", "key")}
    )


def hosts_of(path: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(path.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_issuing_again_keeps_the_hosts_and_adds_new_ones(tmp_path: Path) -> None:
    make_authority(tmp_path, ["syncer.example", "10.1.2.3"])
    make_authority(tmp_path)
    make_authority(tmp_path, ["b.example", "10.1.2.3"])
    for name in ("syncer.pem", "peer.pem"):
        assert sorted(hosts_of(tmp_path / name)) == [
            "10.1.2.3", "127.0.0.1", "::1", "b.example", "localhost", "syncer.example"
        ]  # fmt: skip


def test_a_damaged_certificate_whose_hosts_are_lost_is_named(tmp_path: Path) -> None:
    make_authority(tmp_path, ["syncer.example"])
    (tmp_path / "syncer.pem").write_bytes(b"nonsense")
    with pytest.raises(SecurityError, match="the hosts it named are lost: remove it and give each"):
        make_authority(tmp_path)


@pytest.mark.parametrize(
    "host", ["http://x:7000", "bad host!!", "", "x:7000", "-a", "a..b", "10.0.0", "ü.de"]
)
def test_a_host_that_is_no_name_or_address_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="neither an IP address nor an ASCII host name"):
        make_authority(tmp_path / "tls", [host])
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize(
    "host", ["a", "my_host", "a-1.example.org", "*.example.org", "[::1]", "10.0.0.7", "7up"]
)
def test_host_names_and_addresses_are_taken(host: str, tmp_path: Path) -> None:
    make_authority(tmp_path, [host])
    assert host.strip("[]") in hosts_of(tmp_path / "syncer.pem")


@pytest.mark.parametrize("name", ["", "ca", "../x", "a/b"])
def test_a_name_that_would_leave_the_directory_is_refused(name: str, authority: Path) -> None:
    with pytest.raises(SecurityError, match="cannot have a certificate"):
        load(authority, name)
    with pytest.raises(SecurityError, match="cannot have a certificate"):
        make_authority(authority, workers=[name])


def test_a_directory_without_the_authoritys_key_is_not_overwritten(tmp_path: Path) -> None:
    make_authority(tmp_path)
    (tmp_path / "ca.key").unlink()
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(SecurityError, match="certificate but not its key"):
        make_authority(tmp_path)
    assert (tmp_path / "ca.pem").read_bytes() == before


# ---- what is refused at load ----


@pytest.mark.parametrize("missing", ["ca.pem", "learner.pem", "learner.key"])
def test_a_missing_file_is_named_with_the_remedy(missing: str, tmp_path: Path) -> None:
    make_authority(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(SecurityError, match=rf"{missing} does not exist: .*archipel certs"):
        load(tmp_path, "learner")


@pytest.mark.parametrize("damaged", ["ca.pem", "learner.pem", "learner.key"])
def test_a_damaged_file_is_named(damaged: str, tmp_path: Path) -> None:
    make_authority(tmp_path)
    (tmp_path / damaged).write_bytes(b"-----BEGIN NONSENSE-----")
    with pytest.raises(SecurityError, match=rf"{damaged} is not"):
        load(tmp_path, "learner")


def test_a_certificate_of_another_authority_is_refused(authority: Path, stranger: Path) -> None:
    mixed = Security(stranger / "ca.pem", authority / "learner.pem", authority / "learner.key")
    with pytest.raises(SecurityError, match="was not issued by the authority"):
        mixed.check()


def test_a_key_of_another_certificate_is_refused(authority: Path) -> None:
    mixed = Security(authority / "ca.pem", authority / "learner.pem", authority / "syncer.key")
    with pytest.raises(SecurityError, match="is not the key of"):
        mixed.check()


@pytest.mark.parametrize(
    ("constant", "days", "file"), [("CERTIFICATE_DAYS", 0, "learner.pem"), ("AUTHORITY_DAYS", 0, "ca.pem")]
)
def test_an_expired_certificate_is_refused_with_its_date(
    constant: str, days: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, constant, days)
    make_authority(tmp_path)
    date = f"{certificate(tmp_path / file).not_valid_after_utc:%Y-%m-%d}"
    monkeypatch.undo()
    with pytest.raises(SecurityError, match=rf"{file} has expired on {date}: .*archipel certs"):
        load(tmp_path, "learner")


def test_a_certificate_from_the_future_points_at_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "CLOCK_SKEW", -datetime.timedelta(days=1))
    make_authority(tmp_path)
    with pytest.raises(SecurityError, match="clock right"):
        load(tmp_path, "syncer")


# ---- who gets in ----


def test_a_member_of_the_authority_gets_in(authority: Path) -> None:
    with (
        serving(load(authority, "syncer")) as (_, address),
        joining(address, load(authority, "island-7")) as ears,
    ):
        assert ears.joined.wait(DEADLINE_S)


@pytest.mark.parametrize("shows", ["nothing", "a stranger's certificate"])
def test_a_client_without_a_certificate_of_the_authority_reaches_no_handler(
    shows: str, authority: Path, stranger: Path
) -> None:
    root = (authority / "ca.pem").read_bytes()
    key, cert = ((stranger / f"learner.{part}").read_bytes() for part in ("key", "pem"))
    own = {} if shows == "nothing" else {"private_key": key, "certificate_chain": cert}
    with serving(load(authority, "syncer")) as (server_ears, address):
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(root, **own)) as channel:
            hello = wire.encode(wire.Hello("intruder", "", PROTOCOL_VERSION, "token"))
            call = channel.stream_stream(f"/{wire.SERVICE}/{wire.CONTROL}")(iter([hello]), timeout=DEADLINE_S)
            with pytest.raises(grpc.RpcError) as refused:
                next(call)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not server_ears.joined.is_set()


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ("stranger", "authority", "copy one DIR of `archipel certs DIR` to all workers"),
        (None, "authority", "if it uses TLS, give --tls DIR here too"),
        ("authority", None, "do both sides use --tls"),
    ],
)
def test_a_client_is_told_what_to_mend(
    ours: str | None, theirs: str | None, reason: str, request: pytest.FixtureRequest
) -> None:
    mine = load(request.getfixturevalue(ours), "learner") if ours else None
    its = load(request.getfixturevalue(theirs), "syncer") if theirs else None
    with serving(its) as (server_ears, address), joining(address, mine) as ears:
        assert ears.turned_away.wait(DEADLINE_S)
        assert reason in ears.reason
        assert ears.final is False
        assert not server_ears.joined.is_set()


def test_a_certificate_for_another_host_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "LOCAL_HOSTS", ("elsewhere.example",))
    make_authority(tmp_path)
    with (
        serving(load(tmp_path, "syncer")) as (_, address),
        joining(address, load(tmp_path, "learner")) as ears,
    ):
        assert ears.turned_away.wait(DEADLINE_S)
        assert "does not name the address we dialled" in ears.reason
        assert not ears.joined.is_set()


def test_a_learners_certificate_cannot_pose_as_the_syncer(authority: Path) -> None:
    with (
        serving(load(authority, "learner")) as (_, address),
        joining(address, load(authority, "learner")) as ears,
    ):
        assert ears.turned_away.wait(DEADLINE_S)
        assert "syncer.pem" in ears.reason
        assert not ears.joined.is_set()


def test_rotated_certificates_work_without_a_restart_of_either_end(tmp_path: Path) -> None:
    make_authority(tmp_path)
    syncer, learner = load(tmp_path, "syncer"), load(tmp_path, "learner")
    with serving(syncer) as (ears, address):
        with joining(address, learner) as client_ears:
            assert client_ears.joined.wait(DEADLINE_S)
        assert ears.left.wait(DEADLINE_S)
        for path in tmp_path.iterdir():
            path.unlink()
        make_authority(tmp_path)  # another authority altogether: only who reads again gets in
        with joining(address, learner) as client_ears:
            assert client_ears.joined.wait(DEADLINE_S)


def test_a_rotation_half_done_leaves_the_old_certificate_in_use(tmp_path: Path) -> None:
    make_authority(tmp_path)
    with serving(load(tmp_path, "syncer")) as (_, address):
        (tmp_path / "syncer.key").write_bytes((tmp_path / "learner.key").read_bytes())
        with joining(address, load(tmp_path, "learner")) as ears:
            assert ears.joined.wait(DEADLINE_S)


# ---- open doors ----


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", ":7000", "[::]:7000", "10.0.0.1:7000", "host.example:0"])
def test_listening_to_strangers_without_tls_is_warned_of(listen: str, authority: Path) -> None:
    warning = warn_if_open(listen, None)
    assert warning is not None
    assert listen in warning
    assert "--tls" in warning
    assert warn_if_open(listen, load(authority, "syncer")) is None


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:7000", "[::1]:7000", "127.8.9.1:1"])
def test_loopback_needs_no_warning(listen: str) -> None:
    assert warn_if_open(listen, None) is None
