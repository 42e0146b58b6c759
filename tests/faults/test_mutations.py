"""The campaign notices: each fault that was mended, put back, is found."""

import campaign
import pytest
from mutations import MUTATIONS
from settings import needs_recovery

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "job", sorted({each.job for each in MUTATIONS.values() if not each.job.startswith("optimizers")})
)
def test_nothing_is_found_as_it_is(job):
    """Of the optimizers, `test_campaign` runs the same seeds."""
    needs_recovery(job)
    results = campaign.run(job)
    assert all(result.passes for result in results), campaign.report(results)


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_put_back_is_found(name):
    needs_recovery(MUTATIONS[name].job)
    # A hang has been found after a few seconds.
    results = campaign.results(MUTATIONS[name].job, limit_s=5, mutation=name)
    assert not all(result.passes for result in results)
    results.close()
