# SPDX-License-Identifier: Apache-2.0
"""Every known constraint is a rule or has a reason why it is not, and never both."""

from shipped import RULES

from skill_tools.reports.rule_folder import coverage_page, load_coverage, load_inventory

INVENTORY = load_inventory()
REASONS = load_coverage()


def test_the_inventory_is_whole_and_without_doubles() -> None:
    assert len(INVENTORY) == len(set(INVENTORY)) >= 343


def test_every_constraint_is_a_rule_or_has_a_reason() -> None:
    open_ids = sorted(set(INVENTORY) - {rule.id for rule in RULES} - set(REASONS))
    assert not open_ids, f"neither a rule nor a reason: {', '.join(open_ids)}"


def test_no_constraint_is_both() -> None:
    assert not sorted({rule.id for rule in RULES} & set(REASONS))


def test_reasons_are_for_known_constraints_only() -> None:
    assert not sorted(set(REASONS) - set(INVENTORY))


def test_every_id_has_one_row() -> None:
    lines = coverage_page(RULES, REASONS).splitlines()
    for identifier in INVENTORY:
        assert sum(line.startswith(f"| {identifier} | ") for line in lines) == 1


def test_the_counts_add_up() -> None:
    total = next(line for line in coverage_page(RULES, REASONS).splitlines() if line.startswith("| all |"))
    constraints, from_config, from_log, without = (int(cell) for cell in total.strip("| ").split(" | ")[1:])
    assert constraints == len(INVENTORY)
    assert from_config + from_log + without <= constraints
    assert without == len(REASONS)
