"""The syncer's process in one piece: opening, what it lets in, and what it leaves."""

import json
import time
import weakref
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from archipel import config as configuration
from archipel.errors import CheckpointError, ConfigError, PayloadError, TransportError
from archipel.protocol import messages as m
from archipel.protocol.rounds import Pulling, Round
from archipel.roles.result import completed, conclude
from archipel.roles.syncer import Opening, data_digest, open_syncer, seeded
from archipel.runtime import checkpoint
from archipel.runtime.host import Envelope
from archipel.tape.follow import starts
from archipel.tape.replay import verify
from archipel.train import corpus, models
from archipel.train.compute import FragmentState
from archipel.train.options import ModelOptions

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "text.txt").write_text("a line of text\n" * 2000)
    corpus.prepare(str(folder / "text.txt"), folder / "tokens.bin")
    return folder / "tokens.bin"


def config_of(tokens: Path, *overrides: str) -> configuration.Config:
    tiny = ["sync.fragments=2", "sync.interval_steps=4", "model.width=16", "model.layers=1", "model.heads=2"]
    return configuration.load(None, [*tiny, f"data.path={tokens}", "data.sequence=32", *overrides])


@pytest.fixture
def opened(tokens: Path, tmp_path: Path):
    """Return a function that opens syncers; all are closed at the end."""
    roles = []

    def build(*overrides: str, **opening):
        role = open_syncer(config_of(tokens, *overrides), Opening(out=tmp_path, **opening))
        roles.append(role)
        return role

    yield build
    for role in roles:
        role.server.stop(0.0)


def envelope(message: m.Message) -> bytes:
    return msgspec.msgpack.encode(Envelope({}, message))


def push(fragment: int = 0, **changes) -> m.Push:
    known = {"tick": 1, "base": 0, "step": 1, "steps": 1, "tokens": 1, "total": 1}
    return m.Push(fragment=fragment, **{**known, **changes})


def test_memory_is_given_only_for_a_push_that_was_asked_for_and_has_its_length(opened) -> None:
    role = opened()
    asked = Round(0, 1, 0.0, {"a": 1}, [], pulling={"a": Pulling(0.0, 60.0)})
    role.machine.rounds.flying[0] = asked
    length = role.outer.push_bytes(0, full=False)
    assert len(role.allocate("a", envelope(push()), length)) == length
    for worker, message, size, words in (
        ("b", push(), length, "was not asked for"),
        ("a", push(1), length, "was not asked for"),
        ("a", push(7), length, "one of the run's fragments"),
        ("a", push(-1), length, "one of the run's fragments"),
        ("a", push(), length + 1, "bytes declared"),
        ("a", push(), 1 << 50, "bytes declared"),
        ("a", push(full=True), length, "bytes declared"),
        ("a", m.Heartbeat(), 10, "only a push"),
    ):
        with pytest.raises(PayloadError, match=words):
            role.allocate(worker, envelope(message), size)
    with pytest.raises(PayloadError, match="are not a message"):
        role.allocate("a", b"\x80\x04.", 10)


def test_push_without_a_payload_is_rejected_and_the_syncer_goes_on(opened) -> None:
    role = opened()
    before = role.outer.digest()
    posted: list[m.Event] = []
    role.host.post = posted.append
    role.act(m.Fold(0, "a", 1.0, 0), None)
    role._work.put(None)
    role._compute()
    (rejected,) = posted
    assert isinstance(rejected, m.Rejected) and (rejected.fragment, rejected.worker) == (0, "a")
    assert "without a payload" in rejected.reason and role.outer.digest() == before
    numel = role.outer.fragments[0].numel
    role.outer.fold(0, bytes(2 * numel), 1.0, base=0, full=False)  # the round itself is as it was
    role.outer.merge(0, 1)
    assert role.outer.digest() == before


def test_run_seed_is_added_to_those_of_model_and_data(opened, tokens: Path) -> None:
    config = config_of(tokens, "run.seed=5", "model.seed=1", "data.seed=2")
    assert (seeded(config).model.seed, seeded(config).data.seed) == (6, 7)
    settings = opened("run.seed=5", "model.seed=1").machine.settings
    assert (settings["model"]["seed"], settings["data"]["seed"]) == (6, 5)


def test_seeds_make_different_initial_weights(opened, tmp_path: Path, tokens: Path) -> None:
    one = opened("run.seed=1")
    two = open_syncer(config_of(tokens, "run.seed=2"), Opening(out=tmp_path / "two"))
    two.server.stop(0.0)
    assert one.outer.digest() != two.outer.digest()


def test_settings_say_what_the_learners_data_must_be(opened, tokens: Path) -> None:
    digest = opened().machine.settings["data_digest"]
    assert digest == corpus.open_tokens(tokens).header.digest
    assert data_digest(config_of(tokens, "data.path=/nowhere.bin"), "") == ""


def test_address_is_written_for_others_to_find(opened, tmp_path: Path) -> None:
    opened(address_file=str(tmp_path / "address"))
    host, _, port = (tmp_path / "address").read_text().partition(":")
    assert host == "127.0.0.1" and int(port) > 0


def test_port_in_use_is_an_error_that_names_it(opened, tmp_path: Path, tokens: Path) -> None:
    role = opened(address_file=str(tmp_path / "address"))
    address = (tmp_path / "address").read_text()
    with pytest.raises(TransportError, match=address.split(":")[1]):
        open_syncer(config_of(tokens), Opening(out=tmp_path / "other", listen=address))
    assert role.server is not None


def test_listening_for_all_without_tls_is_warned_of(opened, caplog: pytest.LogCaptureFixture) -> None:
    opened()
    assert "without TLS" not in caplog.text
    opened(listen="0.0.0.0:0")
    assert "listening on 0.0.0.0:0 without TLS" in caplog.text


def test_checkpoint_is_resumed_only_when_asked_to(opened, tmp_path: Path) -> None:
    role = opened()
    role._save(0)
    role._write(role.saved)
    with pytest.raises(CheckpointError, match="--resume goes on from it, another --out starts afresh"):
        opened()
    again = opened(resume=True)
    assert again.outer.digest() == role.outer.digest() and again.machine.epoch == role.machine.epoch + 1
    with pytest.raises(CheckpointError, match="resume with the options"):
        opened("sync.fragments=4", resume=True)
    with pytest.raises(CheckpointError, match="belongs to run 'run', not to 'other'"):
        opened("run.name=other", resume=True)


def test_gossip_run_is_refused_and_the_rendezvous_named(opened, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="archipel rendezvous"):
        opened("gossip.peers=2")
    assert not list(tmp_path.iterdir())


def test_resuming_where_there_is_nothing_is_warned_of(opened, tmp_path: Path, caplog) -> None:
    role = opened()
    assert "nothing to resume" not in caplog.text
    opened(resume=True)
    assert f"nothing to resume, starting afresh: {tmp_path / 'checkpoints'} holds" in caplog.text
    caplog.clear()
    role._save(0)
    role._write(role.saved)
    opened(resume=True)
    assert "nothing to resume" not in caplog.text


def test_no_epoch_is_taken_twice_though_no_checkpoint_names_it(opened, tmp_path: Path) -> None:
    first = opened()
    first._save(0)
    first._write(first.saved)
    lives = [opened(resume=True) for _ in range(3)]  # each dies before its first checkpoint
    assert [life.machine.epoch for life in lives] == [2, 3, 4]
    lives[-1]._save(0)
    lives[-1]._write(lives[-1].saved)
    (tmp_path / "syncer.epoch").unlink()  # of a release that had none
    last = opened(resume=True)
    assert last.machine.epoch == 5 and last.outer.digest() == first.outer.digest()


def test_no_epoch_is_taken_twice_though_there_is_no_checkpoint(opened) -> None:
    first, second = opened(), opened()
    assert (first.machine.epoch, second.machine.epoch) == (1, 2)
    assert first.outer.digest() == second.outer.digest() and second.machine.versions == [0, 0]


def test_epoch_that_cannot_be_read_is_an_error(opened, tmp_path: Path) -> None:
    (tmp_path / "syncer.epoch").write_text("")
    with pytest.raises(CheckpointError, match=r"syncer\.epoch does not hold the number of an epoch"):
        opened()


def test_a_run_with_epochs_that_left_no_checkpoint_verifies(opened, tmp_path: Path) -> None:
    for resume in (False, True, True):
        role = opened(resume=resume)
        role.host.handle(m.Woke())
        role.tape.close()
    assert role.machine.epoch == 3
    verified = verify(tmp_path)
    assert verified.equal and verified.records == 3
    assert [start.epoch for start in starts(tmp_path)] == [0, 1, 2]


def test_a_checkpoint_that_was_written_holds_no_weights(opened, tmp_path: Path) -> None:
    role = opened()
    writer = role._threads[1]
    writer.start()
    role._save(1)
    deadline = time.monotonic() + 15.0
    while role.saved is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list((tmp_path / "checkpoints").iterdir())
    old = [weakref.ref(tensor) for tensor in (role.outer.states[0].weights, role.outer.states[0].momentum)]
    role.outer.states[0] = FragmentState(1, torch.zeros(1), torch.zeros(1))
    while any(ref() is not None for ref in old) and time.monotonic() < deadline:
        time.sleep(0.01)
    held = [ref() is not None for ref in old]
    role._saves.put(None)
    writer.join()
    assert held == [False, False]


def test_checkpoint_holds_the_versions_that_the_machine_knows(opened) -> None:
    role = opened()
    role.machine.rounds.flying[0] = Round(0, 1, 0.0, {"a": 1}, [], merging=True)
    before, momentum = role.outer.digest(), weakref.ref(role.outer.states[0].momentum)
    numel = role.outer.fragments[0].numel
    role.outer.fold(0, bytes(2 * numel - 2) + b"\x80\x3f", 1.0, base=0, full=False)  # 1.0 in bfloat16
    role._merge(m.Merge(0, 1))  # done, and its word waits in the inbox
    role._save(0)
    assert role.outer.digest(role.saved.states) == before != role.outer.digest()
    state = msgspec.json.decode(role.saved.machine)
    assert (state["versions"], state["owed"], state["published"]) == ([0, 0], [0], [0, 0])
    role.saved = None
    role._saves.get()
    role.host._turn()
    role._save(1)
    state = msgspec.json.decode(role.saved.machine)
    assert (state["versions"], state["owed"], state["published"]) == ([1, 0], [], [1, 0])
    assert role.outer.digest(role.saved.states) == role.outer.digest()
    assert momentum() is None  # what was kept for the machine's sake has gone


@pytest.mark.parametrize("failures", [1, 2])
def test_last_checkpoint_is_tried_again(
    opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    save, tries = checkpoint.save, []

    def failing(directory: Path, step: int, *rest, **named) -> Path:
        tries.append(json.loads(rest[1])["rounds_merged"])
        if len(tries) <= failures:
            raise CheckpointError("no room")
        return save(directory, step, *rest, **named)

    monkeypatch.setattr(checkpoint, "save", failing)
    role = opened()
    role.machine.begun = True  # its first save is past
    role.machine.rounds_merged = 5
    role.host.post(m.StopRequested("enough"))
    role.run()
    assert tries == [5, 5] and caplog.text.count("no room") == failures
    assert "trying to write the last checkpoint again round=5" in caplog.text
    assert (checkpoint.load_newest(tmp_path / "checkpoints") is not None) == (failures == 1)
    assert role.saved is not None  # the result is made from it, on disk or not


def test_merge_that_fails_leaves_the_checkpoint_as_it_is(opened) -> None:
    role = opened()
    posted: list[m.Event] = []
    role.host.post = posted.append
    numel = role.outer.fragments[0].numel
    role.outer.fold(0, bytes(2 * numel), 1.0, base=0, full=False)
    role.outer.states[0].momentum.fill_(float("inf"))
    role._merge(m.Merge(0, 1))
    assert isinstance(posted[0], m.MergeFailed)
    role._save(0)
    assert [state.version for state in role.saved.states] == [0, 0] and not role._unheard


def test_result_is_that_of_the_last_checkpoint(opened, tmp_path: Path) -> None:
    role = opened()
    role._save(0)
    at_save = role.outer.digest()
    numel = role.outer.fragments[0].numel
    role.outer.fold(0, bytes(2 * numel - 2) + b"\x80\x3f", 1.0, base=0, full=False)  # 1.0 in bfloat16
    role.outer.merge(0, 1)
    finish = m.Finish("stopped", complete=False)
    conclude(role.machine, role.outer, role.saved.states, out=tmp_path, finish=finish)
    facts = json.loads((tmp_path / "syncer.json").read_text())
    assert facts["digest"] == at_save != role.outer.digest() and facts["versions"] == [0, 0]
    assert facts["ledger_closes"] and not facts["complete"]


def test_model_is_exported_whole_with_what_was_not_synchronised(opened, tmp_path: Path, caplog) -> None:
    role = opened("sync.exclude=['*norm*']")
    conclude(role.machine, role.outer, role.outer.states, out=tmp_path, finish=m.Finish("done"))
    exported = load_file(tmp_path / "model" / "model.safetensors")
    fresh = models.build(configuration.from_settings(role.machine.settings).model).state_dict()
    assert {name for name in fresh if "lm_head" not in name} <= set(exported)
    assert "not synchronised, exported as they began" in caplog.text
    assert json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"] == 256


def test_weights_of_another_model_are_exported_as_they_are(opened, tmp_path: Path) -> None:
    save_file({"mine.weight": torch.ones(2, 3)}, tmp_path / "init.safetensors", {"buffers": ""})
    role = opened("sync.fragments=1", init=str(tmp_path / "init.safetensors"))
    conclude(role.machine, role.outer, role.outer.states, out=tmp_path, finish=m.Finish("done"))
    assert torch.equal(load_file(tmp_path / "model" / "weights.safetensors")["mine.weight"], torch.ones(2, 3))


def test_given_weights_of_the_builtin_model_complete_its_options(opened, tmp_path: Path) -> None:
    options = ModelOptions(width=16, layers=1, heads=2, vocabulary=300, sequence=32)
    state = {
        name: tensor
        for name, tensor in models.build(options, 9).state_dict().items()
        if "lm_head" not in name
    }
    save_file(state, tmp_path / "init.safetensors")
    role = opened(init=str(tmp_path / "init.safetensors"))
    assert role.machine.settings["model"]["vocabulary"] == 300
    assert completed(state, options)["lm_head.weight"].shape == (300, 16)


def test_error_in_the_tensor_thread_ends_the_process_instead_of_a_round(opened) -> None:
    role = opened()
    role._work.put(lambda: (_ for _ in ()).throw(MemoryError("no room")))
    role._compute()
    with pytest.raises(MemoryError, match="no room"):
        role.host.run()
