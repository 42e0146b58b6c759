"""The campaign notices: each fault that was mended, put back, is found."""

import campaign
import pytest
from mutations import MUTATIONS

pytestmark = pytest.mark.slow


def test_nothing_is_found_as_it_is():
    """Of the optimizers, `test_campaign` runs the same seeds."""
    (job,) = {mutation.job for mutation in MUTATIONS.values() if not mutation.job.startswith("optimizers")}
    results = campaign.run(job)
    assert all(result.passes for result in results), campaign.report(results)


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_put_back_is_found(name):
    # A hang has been found after a few seconds.
    results = campaign.results(MUTATIONS[name].job, limit_s=5, mutation=name)
    assert not all(result.passes for result in results)
    results.close()
