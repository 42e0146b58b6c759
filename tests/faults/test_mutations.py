# SPDX-License-Identifier: Apache-2.0
"""The campaign notices: each fault that was mended, put back, is found."""

import campaign
import pytest
from mutations import MUTATIONS
from settings import needs_recovery

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_put_back_is_found(name):
    needs_recovery(MUTATIONS[name].job)
    # Without it all of them pass, as `test_campaign` proves. A hang has been found after a few seconds.
    results = campaign.results(MUTATIONS[name].job, limit_s=5, mutation=name)
    assert not all(result.passes for result in results)
    results.close()
