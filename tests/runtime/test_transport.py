"""The transport between real sockets of this machine: what a sink hears, and what no peer can do to it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy
import pytest

from archipel.errors import ConfigError, PayloadError, TransportError
from archipel.runtime import wire
from archipel.runtime.relay import Relay
from archipel.runtime.security import load, make_authority
from archipel.runtime.transport import Client, NetworkOptions, Server

from .conftest import (
    BRISK,
    DEADLINE_S,
    PATIENT,
    RUN,
    Sink,
    client_of,
    header,
    serving,
    until,
    verdict_of,
)

# ---- the ordinary ----


def test_control_frames_arrive_in_order_both_ways() -> None:
    frames = [b"%d" % i for i in range(500)]
    with serving() as (server, sink, address), client_of(address) as (client, client_sink):
        client_sink.wait("connected")
        for frame in frames:
            client.send(frame)
            server.send("learner-0", frame)
        sink.wait("received", count=len(frames))
        client_sink.wait("received", count=len(frames))
    assert sink.words[0] == ("connected", "learner-0")
    assert [words[2] for words in sink.said("received")] == frames
    assert [words[1] for words in client_sink.said("received")] == frames


def test_a_control_frame_overtakes_a_payload_on_a_slow_line() -> None:
    payload, there = bytes(1 << 20), {}  # bytes that were there when the word came
    with serving() as (server, server_sink, address):
        relay = Relay(address)
        with client_of(relay.start()) as (client, sink):
            sink.wait("connected")
            for count, bytes_per_s in ((1, 0.0), (2, 5e5)):  # first at full speed, which opens gRPC's windows
                relay.throttle(bytes_per_s)
                client.send_bulk(b"push", payload)
                server.send_bulk("learner-0", 0, b"update", payload)
                server_sink.wait("allocated", count=count)
                sink.wait("allocated", count=count)
                until(lambda n=count: min(server.bytes_in, client.bytes_in) >= len(payload) + (n - 1))
            server_sink.answer = lambda *words: there.setdefault((*words, "up"), server.bytes_in)
            sink.answer = lambda *words: there.setdefault((*words, "down"), client.bytes_in)
            client.send(b"word")
            server.send("learner-0", b"word")
            server_sink.wait("received", "learner-0", b"word")
            sink.wait("received", b"word")
        relay.stop()
    up = there["received", "learner-0", b"word", None, "up"]
    down = there["received", b"word", None, "down"]
    assert max(up, down) < 1.5 * len(payload)


@pytest.mark.parametrize("up", [True, False])
def test_a_payload_that_takes_longer_than_a_sign_of_life_may_is_no_death(up: bool) -> None:
    options = NetworkOptions(keepalive_s=0.3, keepalive_timeout_s=0.5, backoff_s_min=0.02, backoff_s_max=0.1)
    payload = bytes(8 << 20)
    with serving(options) as (server, server_sink, address):
        relay = Relay(address)
        with client_of(relay.start(), options=options) as (client, sink):
            sink.wait("connected")
            # At full speed first: that opens windows, and seconds of the next payload are sent at once.
            for count, bytes_per_s in ((1, 0.0), (2, 2e6)):
                relay.throttle(bytes_per_s)
                if up:
                    client.send_bulk(b"push", payload)
                else:
                    server.send_bulk("learner-0", 0, b"update", payload)
                until(lambda n=count: (server if up else client).bytes_in >= n * len(payload))
            assert not sink.said("disconnected") and not server_sink.said("disconnected")
        relay.stop()


@pytest.mark.parametrize("size", [0, 1, 64 << 10, (64 << 10) + 1, 3_000_000])
def test_a_payload_arrives_whole_both_ways(size: int) -> None:
    payload = os.urandom(size)
    with serving() as (server, sink, address), client_of(address) as (client, client_sink):
        client_sink.wait("connected")
        client.send_bulk(b"push", payload, done=client_sink.done)
        server.send_bulk("learner-0", 0, b"update", memoryview(payload))
        assert sink.wait("received") == ("received", "learner-0", b"push", payload)
        assert client_sink.wait("done") == ("done", True, "")
        assert client_sink.wait("received") == ("received", b"update", payload)
        assert sink.wait("sent") == ("sent", "learner-0", 0, size)
        assert server.bytes_of("learner-0") == (size, size)
        assert (server.bytes_in, server.bytes_out) == (size, size) == (client.bytes_out, client.bytes_in)


def test_typed_and_multidimensional_buffers_are_payloads() -> None:
    payload = memoryview(bytearray(range(24))).cast("i", shape=[2, 3])
    with serving() as (_, sink, address), client_of(address) as (client, client_sink):
        client_sink.wait("connected")
        client.send_bulk(b"push", payload)
        assert sink.wait("received")[3] == bytes(range(24))


@pytest.mark.parametrize("shape", [(), (0,), (0, 5)])
def test_arrays_without_dimensions_or_elements_are_payloads(shape: tuple[int, ...]) -> None:
    payload = numpy.ones(shape, dtype=numpy.float32)
    with serving() as (server, _, address), client_of(address) as (_, client_sink):
        client_sink.wait("connected")
        server.send_bulk("learner-0", 0, b"update", payload.data)
        assert client_sink.wait("received")[2] == payload.tobytes()


def test_a_buffer_with_gaps_is_refused_before_it_is_queued() -> None:
    with serving() as (server, _, address), client_of(address) as (_, client_sink):
        client_sink.wait("connected")
        with pytest.raises(PayloadError, match="contiguous"):
            server.send_bulk("learner-0", 0, b"", memoryview(bytes(10))[::2])


def test_a_newer_payload_replaces_one_of_its_key_that_has_not_started() -> None:
    big, options = bytes(8 << 20), NetworkOptions(chunk_bytes=64 << 10, window_bytes=64 << 10)
    with serving(options) as (server, sink, address):
        gate = threading.Event()
        sink_of_client = Sink()
        sink_of_client.answer = lambda *words: (
            gate.wait(DEADLINE_S) if words[:2] == ("received", b"0") else None
        )
        client = Client(sink_of_client, options, address=address, worker="w", run=RUN)
        client.start()
        sink.wait("connected")
        server.send_bulk("w", "first", b"0", b"")  # its receiver waits, so that `big` clogs the stream
        server.send_bulk("w", "clog", b"1", big)
        sink_of_client.wait("received", b"0")
        sink.wait("sent", "w", "first")
        for key, message in (("a", b"a1"), ("b", b"b1"), ("a", b"a2"), ("b", b"b2"), ("a", b"a3")):
            server.send_bulk("w", key, message, b"x")
        gate.set()
        sink_of_client.wait("received", b"b2")
        client.stop(grace_s=0.2)
    assert [words[1] for words in sink_of_client.said("received")] == [b"0", b"1", b"a3", b"b2"]


def test_sixteen_clients_upload_and_download_at_once() -> None:
    names = [f"learner-{i}" for i in range(16)]
    weights = os.urandom(300_000)
    with serving() as (server, sink, address):
        sinks = {name: Sink() for name in names}
        clients = [Client(sinks[name], BRISK, address=address, worker=name, run=RUN) for name in names]
        for client in clients:
            client.start()
        for name, client in zip(names, clients, strict=True):
            sinks[name].wait("connected")
            client.send_bulk(name.encode(), name.encode() * 20_000)
        for name in names:
            server.send_bulk(name, 0, b"update", weights, wire.checksum(weights))
        sink.wait("received", count=16)
        for name in names:
            assert sinks[name].wait("received") == ("received", b"update", weights)
        for client in clients:
            client.stop(grace_s=0.2)
    assert sorted((words[1], words[3]) for words in sink.said("received")) == sorted(
        (name, name.encode() * 20_000) for name in names
    )


def test_stop_delivers_what_was_queued() -> None:
    with serving() as (_, sink, address), client_of(address) as (client, client_sink):
        client_sink.wait("connected")
        client.send_bulk(b"last push", bytes(1_000_000), done=client_sink.done)
        client.send(b"leave")
        client.stop(grace_s=DEADLINE_S)
        sink.wait("received", "learner-0", b"last push")
        sink.wait("received", "learner-0", b"leave")
        assert sink.wait("disconnected")[2] == "the worker closed the connection"
        assert client_sink.said("done") == [("done", True, "")]


def test_stop_leaves_no_thread_and_frees_the_port() -> None:
    before = set(threading.enumerate())
    with serving() as (server, _, address), client_of(address) as (_, client_sink):
        client_sink.wait("connected")
        server.send_bulk("learner-0", 0, b"", bytes(1000))
        client_sink.wait("received")
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass
    ours = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("archipel")}
    assert ours == set()


def test_messages_and_payloads_beyond_the_limit_are_refused_to_their_sender() -> None:
    options = NetworkOptions(frame_bytes_max=2000, transfer_bytes_max=5000)
    client = Client(Sink(), options, address="127.0.0.1:1", worker="w", run=RUN)
    server = Server(Sink(), options, listen="127.0.0.1:0", run=RUN)
    with pytest.raises(TransportError, match=r"network.frame_bytes_max=2000"):
        server.send("w", bytes(2001))
    with pytest.raises(TransportError, match=r"5001 bytes exceeds network.transfer_bytes_max=5000"):
        client.send_bulk(b"", bytes(5001))


@pytest.mark.parametrize(
    "changes", [{"chunk_bytes": 0}, {"keepalive_s": 0}, {"backoff_s_min": 9.0}, {"frame_bytes_max": 1}]
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"network.{next(iter(changes))}"):
        NetworkOptions(**changes)


# ---- addresses ----


def test_port_in_use_names_address_and_remedy() -> None:
    with serving() as (_, _, address):
        second = Server(Sink(), BRISK, listen=address, run=RUN)
        with pytest.raises(
            TransportError, match=rf"{address}: Address already in use; stop what listens there"
        ):
            second.start()


def test_port_zero_takes_a_free_port() -> None:
    with serving() as (_, _, first), serving() as (_, _, second):
        assert first != second
        assert ":0" not in first + second


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(TransportError, match="listen on an address of this machine"):
        Server(Sink(), BRISK, listen="192.0.2.1:0", run=RUN).start()


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":7000", "a:b", "::1:7000", "h:70000", "h:0"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(TransportError, match="HOST:PORT"):
        Client(Sink(), BRISK, address=address, worker="w", run=RUN).start()


def test_a_name_that_does_not_resolve_is_a_clear_error_at_start() -> None:
    client = Client(
        Sink(), NetworkOptions(resolve_s_max=4.0), address="no-such.invalid:7000", worker="w", run=RUN
    )
    with pytest.raises(TransportError, match=r"'no-such.invalid' d(oes|id) not resolve.*IP address"):
        client.start()
    client.stop()


# ---- coming and going ----


def test_a_client_waits_for_a_server_that_is_not_there_yet() -> None:
    with serving() as (_, _, address):
        pass
    with client_of(address) as (client, sink):
        client.send(b"lost")
        client.send_bulk(b"lost", b"x", done=sink.done)
        assert sink.wait("done") == ("done", False, "not connected")
        assert client.dropped == 1
        with serving(listen=address) as (_, server_sink, _):
            sink.wait("connected")
            client.send(b"found")
            server_sink.wait("received", "learner-0", b"found")
    assert server_sink.said("received") == [("received", "learner-0", b"found", None)]


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_reconnects_after_the_server_restarted(tls: bool, tmp_path: Any) -> None:
    if tls:
        make_authority(tmp_path)
    ours, theirs = (load(tmp_path, role) if tls else None for role in ("syncer", "learner"))
    with serving(security=ours) as (_, first, address):
        client = Client(sink := Sink(), BRISK, address=address, worker="w", run=RUN, security=theirs)
        client.start()
        first.wait("connected")
        sink.wait("connected")
    assert sink.wait("disconnected")[1] == "the server stops"
    with serving(listen=address, security=ours) as (server, second, _):
        second.wait("connected", "w")
        sink.wait("connected", count=2)
        server.send_bulk("w", 0, b"again", bytes(200_000))
        sink.wait("received", b"again")
    client.stop(grace_s=0.2)


def test_close_tells_the_client_why_and_lets_it_come_back() -> None:
    with serving() as (server, sink, address), client_of(address) as (_, client_sink):
        client_sink.wait("connected")
        server.close("learner-0", "silent for 15 s")
        assert client_sink.wait("disconnected")[1] == "silent for 15 s"
        assert sink.wait("disconnected") == ("disconnected", "learner-0", "silent for 15 s")
        sink.wait("connected", count=2)
        client_sink.wait("connected", count=2)


def test_a_second_connection_of_a_name_replaces_the_first_in_order() -> None:
    with serving() as (server, sink, address), client_of(address, "twin") as (_, older):
        older.wait("connected")
        with client_of(address, "twin") as (_, newer):
            newer.wait("connected")
            reason = older.wait("refused")
            server.send("twin", b"for the newer")
            newer.wait("received", b"for the newer")
            assert reason[2] is True
            assert "running twice" in reason[1]
    assert [words[0] for words in sink.words] == ["connected", "disconnected", "connected", "disconnected"]
    assert "replaced" in sink.words[1][2]
    assert older.said("received") == []


def test_a_half_open_connection_is_noticed_by_both_ends() -> None:
    options = NetworkOptions(keepalive_s=0.5, keepalive_timeout_s=0.5, backoff_s_min=0.02, backoff_s_max=0.1)
    with serving(options) as (_, sink, address):
        relay = Relay(address)
        with client_of(relay.start(), options=options) as (_, client_sink):
            client_sink.wait("connected")
            relay.half_open()
            client_sink.wait("disconnected")
            sink.wait("disconnected")
            client_sink.wait("connected", count=2)
        relay.stop()
    assert [words[0] for words in sink.words[:3]] == ["connected", "disconnected", "connected"]


def test_a_reset_fails_the_upload_under_way_and_the_client_comes_back() -> None:
    with serving(PATIENT) as (_, sink, address):
        relay = Relay(address)
        with client_of(relay.start(), options=PATIENT) as (client, client_sink):
            client_sink.wait("connected")
            relay.throttle(200_000)
            client.send_bulk(b"cut", bytes(10 << 20), done=client_sink.done)
            client.send_bulk(b"behind it", b"x", done=client_sink.done)
            sink.wait("allocated")
            relay.cut()
            assert client_sink.wait("done")[1] is False
            assert client_sink.wait("done", count=2)[1] is False
            relay.throttle(0)
            client_sink.wait("connected", count=2)
            client.send_bulk(b"after", b"y", done=client_sink.done)
            sink.wait("received", "learner-0", b"after")
        relay.stop()
    assert [words[2] for words in sink.said("received")] == [b"after"]


KILLED_UPLOADER = """
import sys, time
import grpc
from archipel.runtime import wire
channel = grpc.insecure_channel(sys.argv[1])
def hello():
    yield wire.encode(wire.Hello("victim", "", wire.PROTOCOL_VERSION, "token"))
    time.sleep(60)
control = channel.stream_stream(f"/{wire.SERVICE}/{wire.CONTROL}")(hello())
next(control)
def half():
    yield wire.encode(wire.Header(b"push", 2 << 20, 0))
    yield bytes(1 << 20)
    print("half", flush=True)
    time.sleep(60)
channel.stream_unary(f"/{wire.SERVICE}/{wire.UPLOAD}")(half(), metadata=((wire.TOKEN_KEY, "token"),))
"""


def test_a_worker_killed_during_an_upload_is_gone_at_once_and_delivers_nothing() -> None:
    with serving(PATIENT) as (_, sink, address):
        victim = subprocess.Popen([sys.executable, "-c", KILLED_UPLOADER, address], stdout=subprocess.PIPE)
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"half\n"
        sink.wait("allocated", 2 << 20)
        os.kill(victim.pid, signal.SIGKILL)
        sink.wait("disconnected", "victim")  # long before a keepalive could notice
        victim.wait()
        victim.stdout.close()
    assert sink.said("received") == []


def test_a_client_can_be_stopped_at_any_moment() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, serving() as (_, _, address):
        nobody = f"127.0.0.1:{mute.getsockname()[1]}"
        for target, run in ((nobody, RUN), (address, RUN), (address, "other")):
            before = set(threading.enumerate())
            client = Client(sink := Sink(), BRISK, address=target, worker="w", run=run)
            client.start()
            if run == "other":
                sink.wait("refused")
            client.stop(grace_s=0.1)
            client.stop()
            client.send(b"late")
            client.send_bulk(b"late", b"x", done=sink.done)
            assert sink.wait("done") == ("done", False, "the client is stopped")
            assert not [
                one for one in set(threading.enumerate()) - before if one.name.startswith("archipel-c")
            ]
    Client(Sink(), BRISK, address=nobody, worker="w", run=RUN).stop()


def test_an_upload_that_stalls_ends_with_its_connection(stranger: Any) -> None:
    with serving() as (server, sink, address):
        one = stranger(address)
        assert verdict_of(one.join()).accepted
        forever = threading.Event()

        def frames() -> Iterator[bytes]:
            yield header(b"abcd")
            yield b"ab"
            forever.wait()

        upload = one.channel.stream_unary(f"/{wire.SERVICE}/{wire.UPLOAD}")
        call = upload.future(frames(), metadata=((wire.TOKEN_KEY, "token"),))
        until(lambda: server.bytes_of("stranger")[0] == 2)
        server.close("stranger", "too slow")
        sink.wait("disconnected", "stranger", "too slow")
        try:
            reason = wire.decode(call.result(timeout=DEADLINE_S), wire.Receipt).reason
        except grpc.RpcError as error:  # when the server was waiting for the next chunk
            reason = str(error)
        forever.set()
        assert reason


def test_many_connections_leave_no_file_open() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with serving() as (_, sink, address):
        counts = []
        for i in range(1, 41):
            with client_of(address) as (_, client_sink):
                client_sink.wait("connected")
            sink.wait("disconnected", count=i)
            counts.append(open_files())
    assert max(counts[20:]) < max(counts[:20]) + 10  # one a connection would be 20


def test_a_client_that_hangs_up_comes_back() -> None:
    with serving() as (_, server_sink, address), client_of(address) as (client, sink):
        sink.wait("connected")
        client.reconnect("to try again")
        sink.wait("disconnected", "to try again")
        sink.wait("connected", count=2)
        server_sink.wait("connected", "learner-0", count=2)
