"""Every rule of a run's configuration: what breaks it, and that the message gives rule, values and remedy."""

import msgspec
import pytest

from archipel import config
from archipel.config import Config
from archipel.errors import ConfigError


def loaded(*overrides: str) -> Config:
    return config.load(None, list(overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sync.steps=0"], "sync.steps=0 must be at least 1"),
        (["sync.learners=0"], "sync.learners=0 must be at least 1"),
        (["sync.quorum=0"], "sync.quorum=0 must be at least 1"),
        (["sync.fragments=0"], "sync.fragments=0 must be at least 1"),
        (["sync.interval_steps=0"], "sync.interval_steps=0 must be at least 1"),
        (["sync.pulls_max=0"], "sync.pulls_max=0 must be at least 1"),
        (["sync.checkpoint_rounds=0"], "sync.checkpoint_rounds=0 must be at least 1"),
        (["sync.fragments=30"], "fragments=30 exceeds sync.interval_steps=24: a fragment would never be due"),
        (["sync.overlap_steps=-1"], "sync.overlap_steps=-1 must not be negative"),
        (["sync.fragments=2", "sync.interval_steps=2", "sync.overlap_steps=2"], "use a smaller overlap"),
        (["sync.quorum=3"], "sync.quorum=3 exceeds sync.learners=2: no tick could ever close"),
        (["sync.local_share=1.0"], "sync.local_share=1.0 must be in [0.0, 1.0)"),
        (["sync.outer_momentum=-0.1"], "sync.outer_momentum=-0.1 must be in [0.0, 1.0)"),
        (["sync.grace_margin=1.5"], "sync.grace_margin=1.5 must be in [0.0, 1.0)"),
        (["sync.outer_lr=0"], "sync.outer_lr=0.0 must be positive"),
        (["sync.outer_lr=nan"], "sync.outer_lr=nan must be positive"),
        (["sync.codec_block=7"], "sync.codec_block=7 must be even and at least 2; use 128"),
        (["sync.max_lead_steps=-1"], "max_lead_steps=-1 must not be negative"),
        (["sync.heartbeat_s=0"], "sync.heartbeat_s=0.0 must be positive"),
        (["sync.silence_s=nan"], "sync.silence_s=nan must be positive"),
        (["sync.pull_deadline_s=-1"], "sync.pull_deadline_s=-1.0 must be positive"),
        (["sync.idle_exit_s=-1"], "sync.idle_exit_s=-1.0 must not be negative; 0 waits for ever"),
        (["sync.silence_s=4"], "sync.silence_s=4.0 is not above two sync.heartbeat_s=2.0"),
        (["sync.learners=65", "data.shards=64"], "sync.learners=65 exceeds data.shards=64"),
        (["run.name=' '"], "run.name is empty"),
        (["checkpoint.keep=0"], "checkpoint.keep=0 must be at least 1"),
        (["model.width=10"], "model.width=10 is not a multiple of model.heads=4"),
        (["sync.nonsense=1"], "there is no option `nonsense` - at `sync`"),
        (["nonsense.steps=1"], "there is no option `nonsense`"),
        (["sync.steps=many"], "Expected `int`, got `str` - at `sync.steps`"),
        (["sync.merge=median"], "at `sync.merge`"),
        (["sync.steps"], "--set 'sync.steps' is not section.key=value, as in sync.learners=4"),
        (["gossip.peers=20", "data.shards=16"], "gossip.peers=20 exceeds data.shards=16"),
        (["gossip.alpha=0.0"], "gossip.alpha=0.0 must be above 0"),
        (["gossip.outer_momentum=1.0"], "gossip.outer_momentum=1.0 must be in [0, 1)"),
        (["gossip.rounds=0"], "gossip.rounds=0 must be at least 1"),
        (["gossip.timeout_s_min=9", "gossip.timeout_s_max=3"], "gossip.timeout_s_min=9.0 exceeds"),
        (["steps=3"], "is not section.key=value"),
        (["sim.step_s=0"], "sim.step_s=0.0 makes no sense: use a finite value above 0"),
        (["sim.step_s=-1"], "sim.step_s=-1.0 makes no sense"),
        (["sim.tokens=-5"], "sim.tokens=-5 makes no sense: use a finite value above 0"),
        (["sim.speed_spread=-2"], "sim.speed_spread=-2.0 makes no sense: use a finite value of 0 or more"),
        (["sim.jitter=-0.1"], "sim.jitter=-0.1 makes no sense"),
        (["sim.jitter=1.0"], "sim.jitter=1.0 would make steps of no length: use less than 1"),
        (["sim.slow_learner=0"], "sim.slow_learner=0.0 makes no sense"),
        (["sim.slow_link_bytes_per_s=-1"], "sim.slow_link_bytes_per_s=-1.0 makes no sense"),
        (["sim.fragment_bytes=-1"], "sim.fragment_bytes=-1.0 makes no sense"),
        (["sim.fold_s=-1"], "sim.fold_s=-1.0 makes no sense"),
        (["sim.merge_s=nan"], "sim.merge_s=nan makes no sense"),
        (["sim.horizon_s=inf"], "sim.horizon_s=inf makes no sense"),
        (["sim.link={bytes_per_s=0.0}"], "sim.link.bytes_per_s=0.0 is not positive"),
        (["sim.link={latency_s=-1.0}"], "sim.link.latency_s=-1.0 makes no sense"),
        (["sim.link={retry_s=0.0}"], "sim.link.retry_s=0.0 makes no sense: use a finite value above 0"),
        (["sim.all_reduce={bytes_per_s=0.0}"], "sim.all_reduce.bytes_per_s=0.0 makes no sense"),
        (["sim.all_reduce={sites=0}"], "sim.all_reduce.sites=0 makes no sense"),
        (["sim.weather={kill_s=-1.0}"], "sim.weather.kill_s=-1.0 makes no sense: use finite seconds of 0"),
        (["sim.weather={mean_for_s=0.0}"], "sim.weather.mean_for_s=0.0 makes no sense"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)  # fmt: skip
def test_broken_rule_is_named_with_its_values(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        loaded(*overrides)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_defaults_are_the_papers() -> None:
    sync = loaded().sync
    assert (sync.fragments, sync.interval_steps, sync.overlap_steps, sync.quorum) == (24, 24, 2, 1)
    assert (sync.outer_lr, sync.outer_momentum, sync.grace_margin, sync.local_share) == (0.7, 0.9, 0.9, 0.0)
    assert (sync.merge, sync.embedding_merge, sync.fragmentation) == (
        "radial_directional",
        "average",
        "balanced",
    )


def test_overrides_are_read_as_toml_and_bare_words_as_text() -> None:
    found = loaded(
        "sync.learners=4", "sync.grace=false", "optimizer.lr=1e-4", "run.name=two words",
        "data.path=a/b.bin",
        'sync.exclude=["a.*", "b"]',
    )  # fmt: skip
    assert (found.sync.learners, found.sync.grace, found.optimizer.lr) == (4, False, 1e-4)
    assert (found.run.name, found.data.path, found.sync.exclude) == ("two words", "a/b.bin", ("a.*", "b"))


def test_override_of_a_key_that_is_no_section_is_refused(tmp_path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("sync = 3\n")
    with pytest.raises(ConfigError, match="sync is no section"):
        config.load(path, ["sync.steps=3"])


def test_missing_and_malformed_files_are_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file or directory; give the path"):
        config.load(tmp_path / "gone.toml")
    (tmp_path / "bad.toml").write_text("[sync\n")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        config.load(tmp_path / "bad.toml")


def test_a_lone_section_takes_no_other(tmp_path) -> None:
    assert config.section(None, "run", config.RunOptions, ["run.name=a"]).name == "a"
    with pytest.raises(ConfigError, match=r"\[sync\] has no meaning here: only \[run\] is read"):
        config.section(None, "run", config.RunOptions, ["sync.steps=3"])
    (tmp_path / "other.toml").write_text("[data]\nbatch = 3\n")
    with pytest.raises(ConfigError, match=r"\[data\] has no meaning here"):
        config.section(tmp_path / "other.toml", "run", config.RunOptions, [])


def test_dumped_configuration_loads_as_it_was(tmp_path) -> None:
    written = loaded(
        "run.name='a \"quoted\" ü name'", "sync.exclude=['x*']", "sync.max_lead_steps=3",
        "optimizer.eps=1e-12", "sync.nesterov=false", "optimizer.betas=[0.5, 0.75]",
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(config.dump(written))
    assert config.load(tmp_path / "run.toml") == written
    gossiping = loaded("gossip.peers=3")
    assert gossiping.gossip is not None and Config().gossip is None
    (tmp_path / "gossip.toml").write_text(config.dump(gossiping))
    assert config.load(tmp_path / "gossip.toml") == gossiping
    assert config.from_settings(config.settings_of(gossiping)).gossip == gossiping.gossip
    (tmp_path / "default.toml").write_text(config.dump(Config()))
    assert config.load(tmp_path / "default.toml") == Config()


def test_settings_of_a_syncer_survive_the_wire_and_carry_more_than_options() -> None:
    ours = loaded("sync.exclude=['x*']", "optimizer.betas=[0.5, 0.75]", "model.width=128")
    settings = config.settings_of(ours, data_digest="abc")
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(settings))
    theirs = config.from_settings(arrived)
    assert (theirs.sync, theirs.optimizer, theirs.model) == (ours.sync, ours.optimizer, ours.model)
    assert arrived["data_digest"] == "abc" and "launch" not in arrived and "network" not in arrived


def test_high_momentum_in_a_short_run_is_warned_of() -> None:
    (warning,) = config.warnings(loaded("sync.steps=240"))
    assert "sync.outer_momentum=0.9 overshoots in a run of 10 rounds per fragment" in warning
    assert config.warnings(loaded("sync.steps=2400")) == []
    assert config.warnings(loaded("sync.steps=240", "sync.outer_momentum=0.5")) == []


def test_the_demos_configuration_is_sound_and_quiet() -> None:
    from pathlib import Path

    found = config.load(Path(config.__file__).parent / "demo.toml")
    assert config.warnings(found) == []


def test_gossip_that_drives_its_peers_apart_warns_with_the_limit_and_a_safe_setting() -> None:
    wild = ["gossip.peers=16", "gossip.scheme=one_peer", "gossip.outer_momentum=0.9"]
    (warning,) = config.warnings(loaded(*wild))
    assert "gossip.outer_momentum=0.9: form=mixed peers=one_peer" in warning and "diverges" in warning
    assert "use momentum=0.7 (limit 0.815), or alpha=0.6 (limit 0.900), or form=drift" in warning
    for tame in (
        "gossip.outer_momentum=0.5",
        "gossip.alpha=0.6",
        "gossip.form=drift",
        "gossip.scheme=two_peer",
    ):
        assert config.warnings(loaded(*wild, tame)) == [], tame
    assert config.warnings(loaded("gossip.peers=16", "gossip.scheme=one_peer_exponential")) == []
