"""What no peer can do to the transport: lies about lengths, wrong checksums, noise, silence and crowds."""

import os
from typing import Any

import grpc
import pytest

from archipel.protocol.messages import PROTOCOL_VERSION
from archipel.runtime import wire
from archipel.runtime.transport import NetworkOptions

from .conftest import (
    DEADLINE_S,
    RUN,
    client_of,
    header,
    serving,
    verdict_of,
)

# ---- what no peer can do ----


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "other"}, "serves run 'run-1', not 'other'"),
        ({"protocol": PROTOCOL_VERSION + 1}, f"you speak version {PROTOCOL_VERSION + 1}"),
        ({"worker": ""}, "1 to 200 printable characters"),
        ({"worker": "a\nb"}, "printable"),
        ({"token": ""}, "no token"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_for_good(changes: Any, reason: str, stranger: Any) -> None:
    with serving() as (_, sink, address):
        verdict = verdict_of(stranger(address).join(**changes))
        assert (verdict.accepted, verdict.final) == (False, True)
        assert reason in verdict.reason
    assert sink.words == []


def test_a_client_of_another_run_stops_trying_and_says_why() -> None:
    with serving() as (_, _, address), client_of(address, run="other") as (_, sink):
        assert sink.wait("refused")[2] is True
        assert "'run-1', not 'other'" in sink.said("refused")[0][1]
        assert sink.said("connected") == []


def test_a_full_server_refuses_for_now_and_takes_a_replacement(stranger: Any) -> None:
    with serving(NetworkOptions(workers_max=1)) as (_, _, address):
        one = stranger(address)
        assert verdict_of(one.join("a", "t1")).accepted
        refusal = verdict_of(one.join("b", "t2"))
        assert (refusal.accepted, refusal.final) == (False, False)
        assert "workers_max=1" in refusal.reason
        assert verdict_of(one.join("a", "t3")).accepted


def test_random_bytes_never_hurt_the_server(stranger: Any) -> None:
    garbage = [os.urandom(size) for size in (1, 7, 100, 5000)]
    bomb = b"cos\nsystem\n(S'touch /tmp/archipel-bomb'\ntR."
    with serving() as (_, sink, address):
        one = stranger(address)
        for frame in (*garbage, bomb, b"\x81" * 3000, b"\x91" * 3000):
            with pytest.raises(grpc.RpcError) as refused:
                next(one.say(frame))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert verdict_of(one.join()).accepted
        for frame in (*garbage, bomb):
            assert "not a Header" in one.upload(frame)
        assert "not a Header" in one.upload()
        with client_of(address) as (client, client_sink):
            client_sink.wait("connected")
            client.send(b"still here")
            sink.wait("received", "learner-0", b"still here")
    assert sink.said("allocated") == []


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([header(b"abcd"), b"abc"], "after 3 of 4 bytes"),
        ([header(b"abcd")], "after 0 of 4 bytes"),
        ([header(b"abcd"), b"abcd", b"e"], "1 bytes came after 4 of 4"),
        ([header(b"abcd"), b"abcde"], "5 bytes came after 0 of 4"),
        ([header(b"abcd"), b"abcx"], "xxh3"),
        ([header(b"", checksum=1)], "xxh3"),
        ([header(b"abcd", checksum=-1), b"abcd"], "xxh3"),
        ([header(b"abcd", length=-4), b"abcd"], "-4 bytes is not between 0"),
    ],
)
def test_a_transfer_that_is_not_what_it_declares_is_refused(frames: Any, reason: str, stranger: Any) -> None:
    with serving() as (_, sink, address):
        one = stranger(address)
        assert verdict_of(one.join()).accepted
        assert reason in one.upload(*frames)
        assert one.upload(header(b"good"), b"good") == ""
        assert [words[3] for words in sink.said("received")] == [b"good"]


def test_an_oversized_declaration_is_refused_before_memory_is_asked_for(stranger: Any) -> None:
    with serving(NetworkOptions(transfer_bytes_max=1000)) as (_, sink, address):
        one = stranger(address)
        assert verdict_of(one.join()).accepted
        assert "network.transfer_bytes_max=1000" in one.upload(header(bytes(1001)), bytes(1001))
        assert "network.transfer_bytes_max=1000" in one.upload(header(b"", length=1 << 62))
        assert sink.said("allocated") == []


def test_a_frame_beyond_the_limit_ends_only_its_own_connection(stranger: Any) -> None:
    options = NetworkOptions(chunk_bytes=64 << 10, frame_bytes_max=2000)
    hello = wire.encode(wire.Hello("shouter", RUN, PROTOCOL_VERSION, "token"))
    with serving(options) as (_, sink, address), client_of(address, options=options) as (client, client_sink):
        client_sink.wait("connected")
        for size in (2001, 10 << 20):
            shouter = stranger(address)
            assert verdict_of(shouter.say(hello)).accepted
            shouter.later.put(bytes(size))
            sink.wait("disconnected", "shouter", count=1 if size == 2001 else 2)
            shouter.close()
        client.send(b"unharmed")
        sink.wait("received", "learner-0", b"unharmed")
    assert sink.said("received", "shouter") == []


def test_bulk_streams_need_a_connection_that_was_let_in(stranger: Any) -> None:
    with serving() as (_, sink, address), client_of(address) as (_, member):
        member.wait("connected")
        one = stranger(address)
        assert "not connected" in one.upload(header(b"x"), b"x", token="guess")
        download = one.channel.unary_stream(f"/{wire.SERVICE}/{wire.DOWNLOAD}")
        with pytest.raises(grpc.RpcError) as refused:
            next(download(b"", metadata=((wire.TOKEN_KEY, "guess"),), timeout=DEADLINE_S))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert sink.words == [("connected", "learner-0")]


def test_a_stream_without_hello_does_not_stay(stranger: Any) -> None:
    with serving(NetworkOptions(connect_s_max=0.2)) as (_, sink, address):
        with pytest.raises(grpc.RpcError) as refused:
            next(stranger(address).say())
        assert refused.value.code() is grpc.StatusCode.CANCELLED
    assert sink.words == []


def test_the_sink_may_refuse_an_upload_and_its_reason_reaches_the_sender() -> None:
    with serving() as (_, sink, address), client_of(address) as (client, client_sink):
        client_sink.wait("connected")
        sink.refuse = "no pull of fragment 7 is open"
        client.send_bulk(b"push", bytes(5 << 20), done=client_sink.done)
        assert client_sink.wait("done") == ("done", False, "no pull of fragment 7 is open")
        client.send_bulk(b"push", b"x", done=client_sink.done)
        assert client_sink.wait("done", count=2) == ("done", True, "")
    assert len(sink.said("connected")) == 1


def test_a_download_the_client_refuses_is_thrown_away_and_the_next_arrives() -> None:
    with serving() as (server, _, address), client_of(address) as (_, client_sink):
        client_sink.wait("connected")
        client_sink.refuse = "unknown fragment"
        server.send_bulk("learner-0", 0, b"refused", header(b"", message=b"forged by the content"))
        server.send_bulk("learner-0", 1, b"taken", b"abc")
        assert client_sink.wait("received", b"taken") == ("received", b"taken", b"abc")
        assert [words[0] for words in client_sink.words] == ["connected", "allocated", "received"]


def test_a_damaged_download_ends_the_connection_and_is_not_delivered() -> None:
    with serving() as (server, _, address), client_of(address) as (_, client_sink):
        client_sink.wait("connected")
        server.send_bulk("learner-0", 0, b"update", b"abcd", checksum=1)
        assert "xxh3" in client_sink.wait("disconnected")[1]
        client_sink.wait("connected", count=2)
    assert client_sink.said("received") == []


def test_a_sink_that_fails_does_not_take_the_connection_with_it() -> None:
    def fail_once(*words: Any) -> None:
        sink.answer = lambda *words: None
        raise RuntimeError("a bug in the owner")

    with serving() as (_, sink, address), client_of(address) as (client, client_sink):
        client_sink.wait("connected")
        sink.answer = fail_once
        client.send(b"one")
        client.send(b"two")
        sink.wait("received", "learner-0", b"two")
    assert len(sink.said("disconnected")) == 1


def test_a_worker_that_does_not_read_is_cut_off(stranger: Any) -> None:
    options = NetworkOptions(backlog_frames_max=64, window_bytes=64 << 10)
    with serving(options) as (server, sink, address):
        stranger(address).join("deaf")  # and never reads its control stream
        sink.wait("connected")
        while not sink.said("disconnected"):
            server.send("deaf", bytes(100_000))
        assert "control frames wait unread" in sink.wait("disconnected", "deaf")[2]
