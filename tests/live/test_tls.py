"""Two terminals with mutual TLS, as the guide says; and four learners planned of whom three come."""

import pytest

from .conftest import Rig

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
