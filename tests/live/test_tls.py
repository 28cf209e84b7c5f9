"""Two terminals with mutual TLS, as the guide says; and four learners planned of whom three come."""

import pytest

from .conftest import Rig
from .test_gossip import GOSSIP, mixes, peer, rendezvous

pytestmark = pytest.mark.live


def test_learners_with_certificates_train_and_one_without_is_refused(rig: Rig) -> None:
    rig.write(sync={"learners": 4, "quorum": 2, "steps": 120})
    certificates = str(rig.folder / "certificates")
    assert rig.archipel("certs", "certs", certificates, "--host", "127.0.0.1").exit_code() == 0
    syncer = rig.syncer("--tls", certificates)
    bare = rig.learner(9)
    learners = [rig.learner(number, "--tls", certificates) for number in range(3)]
    assert [syncer.exit_code(), *(learner.exit_code() for learner in learners)] == [0, 0, 0, 0]
    assert rig.facts()["complete"] and rig.facts()["ledger_closes"]
    assert {f"learner-{number}" for number in range(3)} == set(rig.facts()["positions"])
    # It goes on trying, for as long as it takes, and says why it is not let in.
    assert bare.process.poll() is None
    rig.wait(lambda: "--tls" in bare.output or "certificate" in bare.output, "the reason", 15.0)


def test_peers_with_certificates_gossip_and_one_without_is_not_let_in(rig: Rig) -> None:
    rig.write(gossip={**GOSSIP, "peers": 2, "rounds": 5, "scheme": "one_peer"}, data={"batch": 4})
    certificates = str(rig.folder / "certificates")
    assert rig.archipel("certs", "certs", certificates, "--host", "127.0.0.1").exit_code() == 0
    center = rendezvous(rig, "--tls", certificates)
    bare = peer(rig, "peer-9")
    peers = [peer(rig, f"peer-{number}", "--tls", certificates) for number in range(2)]
    assert [center.exit_code(), *(each.exit_code() for each in peers)] == [0, 0, 0]
    mixed = [action for action in mixes(rig, "peer-0") if action.workers]
    assert mixed and all(action.workers == ("peer-1",) for action in mixed)
    assert bare.process.poll() is None
    rig.wait(lambda: "--tls" in bare.output or "certificate" in bare.output, "the reason", 15.0)
