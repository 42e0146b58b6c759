# SPDX-License-Identifier: Apache-2.0
"""verl's command lines: Hydra's overrides over its own configurations, and the keys for Megatron."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects import registry
from skill_tools.dialects.read import read, read_sources, read_text
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint
from skill_tools.rules.remedies import with_remedies

ACTOR = "actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"


def verl(*words: str, program: str = "verl.trainer.main_ppo") -> Config:
    return read_text(f"python3 -m {program} {' '.join(words)}\n", "run.sh", framework="verl")


def found(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config).findings}


def test_a_key_that_newer_releases_lack_depends_on_the_release_that_nobody_states() -> None:
    config = verl("algorithm.adv_estimator=gae", "critic.model.fsdp_config.param_offload=True")
    ours = {
        release: [
            (str(each.severity), each.depends_on)
            for each in lint(config, versions={"verl": release} if release else {}).findings
            if each.rule == "verl-key-release"
        ]
        for release in ("", "0.7.1", "0.9.1")
    }
    assert ours == {"": [("warning", ("verl>=0.8.0",))], "0.7.1": [], "0.9.1": [("error", ())]}


def test_words_for_another_script_lie_over_the_configuration_that_it_chooses() -> None:
    words = f"{ACTOR}.megatron.use_dist_checkpointing=False {ACTOR}.no_such_key=1 {FSDP}.param_offload=True\n"
    handed_on = read_text(f"bash $ROOT/scripts/baseline.sh {words}", "run.sh", framework="verl")
    assert not {"verl-other-engine", "verl-unknown-key"} & found(handed_on)
    assert handed_on.value(f"{FSDP}.param_offload") is True
    assert "verl-other-engine" in found(read_text(f"python -m verl.trainer.main_ppo {words}", "run.sh"))


def test_overrides_are_typed_as_hydra_types_them() -> None:
    config = verl(f"{FSDP}.param_offload=True", f"{ACTOR}.strategy=fsdp2", "trainer.nnodes=2")
    assert config.value(f"{FSDP}.param_offload") is True
    assert config.value(f"{ACTOR}.strategy") == "fsdp2"
    assert config.value("trainer.nnodes") == 2


def test_a_text_that_no_class_checks_counts_as_python_counts_it() -> None:
    config = verl(f"{ACTOR}.strategy=fsdp2", f"{FSDP}.offload_policy=True", f"{FSDP}.param_offload=007")
    findings = {finding.rule: finding for finding in lint(config).findings}
    assert "verl-policy-overrides" in findings
    assert findings["wrong-type"].severity == "warning"
    assert "to Python it is true" in findings["wrong-type"].message


def test_the_first_release_asks_for_the_reference_models_offload() -> None:
    config = verl("actor_rollout_ref.ref.fsdp_config.param_offload=False")
    rules = {
        release: {finding.rule for finding in lint(config, versions={"verl": release}).findings}
        for release in ("0.1", "0.2")
    }
    assert "verl-ref-always" in rules["0.2"]
    assert "verl-ref-always" not in rules["0.1"]


def test_a_value_of_the_callers_shell_is_open() -> None:
    config = verl(f"{FSDP}.offload_policy=${{OFFLOAD}}")
    assert f"{FSDP}.offload_policy" in config.unresolved


def test_a_python_file_among_the_values_is_no_program() -> None:
    config = verl(f"{ACTOR}.strategy=fsdp2", "custom_reward_function.path=/x/reward.py", "trainer.nnodes=2")
    assert config.value(f"{ACTOR}.strategy") == "fsdp2"


@pytest.mark.parametrize(
    "word",
    ["--config-name=ppo_megatron_trainer", "--config-name='ppo_megatron_trainer.yaml'", "model_engine=megatron",
     "actor@actor_rollout_ref.actor=megatron_actor", f"{ACTOR}.strategy=megatron"],
)  # fmt: skip
def test_the_engine_comes_from_the_configuration_or_a_group(word: str) -> None:
    assert verl(word).value(f"{ACTOR}.strategy") == "megatron"


def test_an_engine_of_the_sft_trainer() -> None:
    assert verl("engine=veomni", program="verl.trainer.sft_trainer").value("engine.strategy") == "veomni"


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        (f"{FSDP}.offload_param=True", "verl-unknown-key"),
        (f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", "verl-mcore-hdo"),
        (f"+{FSDP}.offload_param=True", "verl-unknown-key"),
    ],
)
def test_hydra_refuses_what_its_base_lacks(word: str, rule: str) -> None:
    assert found(verl(word)) == {rule}


@pytest.mark.parametrize(
    "words",
    [
        ("+my.own.key=1",),
        ("hydra.run.dir=/tmp/x",),
        ("++trainer.own=1",),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=8",),
        ("data.train_files=['a','b']",),
        (f"--config-name=mine {FSDP}.offload_param=True",),
        (f"--config-path=/home/me/config {FSDP}.offload_param=True",),
        (f"model_engine=mine {FSDP}.offload_param=True",),
        (f"hydra.searchpath=[pkg://mine] {FSDP}.offload_param=True",),
    ],
)
def test_what_hydra_takes_or_another_base_may_have_is_no_fault(words: tuple[str, ...]) -> None:
    assert not found(verl(*words))


def test_another_program_leaves_open_what_is_not_set() -> None:
    config = verl(f"{FSDP}.offload_policy=True", program="recipe.dapo.main_dapo")
    assert f"{ACTOR}.strategy" in config.maybe_set
    assert not found(config)


def test_a_script_of_another_project_leaves_open_what_is_not_set() -> None:
    words = f"trainer.nnodes=2 rllm.backend=verl {ACTOR}.mine=True"
    script = f"python3 prepare.py --split train\npython3 -u train.py {words}\n"
    config = read_text(script, "run.sh", framework="verl")
    assert f"{ACTOR}.strategy" in config.maybe_set
    assert not config.unknown


def test_a_fork_has_the_keys_of_its_own_configuration(tmp_path: Path) -> None:
    base = tmp_path / "verl" / "trainer" / "config"
    (base / "actor").mkdir(parents=True)
    (base / "ppo_trainer.yaml").write_text("retriever: {topk: 3}\n")
    (base / "actor" / "actor.yaml").write_text("state_masking: false\n")
    script = tmp_path / "examples" / "run.sh"
    script.parent.mkdir()
    words = f"retriever.topk=5 {ACTOR}.state_masking=True {ACTOR}.stat_masking=True"
    script.write_text(f"python3 -m verl.trainer.main_ppo {words}\n")
    assert [each.written for each in read([script]).unknown] == [f"{ACTOR}.stat_masking"]


def test_a_fork_that_is_vendored_one_folder_down_is_one_too(tmp_path: Path) -> None:
    base = tmp_path / "verl" / "verl" / "trainer" / "config"
    base.mkdir(parents=True)
    (base / "ppo_trainer.yaml").write_text("trainer: {own_switch: false}\n")
    script = tmp_path / "scripts" / "run.sh"
    script.parent.mkdir()
    script.write_text("python3 -m verl.trainer.main_ppo trainer.own_switch=True trainer.other_switch=True\n")
    assert [each.written for each in read([script]).unknown] == ["trainer.other_switch"]


def test_a_package_that_has_taken_verl_in_has_its_own_configuration(tmp_path: Path) -> None:
    """Named by the program's module; without its files nothing is known of its keys."""
    script = tmp_path / "recipes" / "run.sh"
    script.parent.mkdir()
    script.write_text(
        "python3 -m mine.verl.trainer.main_ppo trainer.own_switch=True trainer.other_switch=True\n"
    )
    assert not read([script]).unknown
    base = tmp_path / "mine" / "verl" / "trainer" / "config"
    base.mkdir(parents=True)
    (base / "ppo_trainer.yaml").write_text("trainer: {own_switch: false}\n")
    assert [each.written for each in read([script]).unknown] == ["trainer.other_switch"]


def test_a_stated_release_has_its_own_keys() -> None:
    for release, section, is_there in (
        ("0.7.1", "critic.model.fsdp_config", True),
        ("0.7.1", "critic.fsdp", False),
        ("0.8.0", "critic.model.fsdp_config", False),
        ("0.8.0", "critic.fsdp", True),
    ):
        script = f"# verl=={release}\npython3 -m verl.trainer.main_ppo {section}.param_offload=True\n"
        config = read_text(script, "run.sh")
        assert ("verl-key-release" in {each.rule for each in config.faults}) is not is_there, (
            release,
            section,
        )


@pytest.mark.parametrize(
    ("release", "key", "said"),
    [
        ("0.8.0", "critic.model.fsdp_config.param_offload", "in its place: critic.fsdp.param_offload"),
        (
            "0.7.1",
            "critic.fsdp.optimizer_offload",
            "in its place: critic.model.fsdp_config.optimizer_offload",
        ),
        ("", "critic.model.fsdp_config.param_offload", "0.8.0; in its place: critic.fsdp.param_offload"),
        (
            "0.9.1",
            f"{ACTOR}.megatron.grad_offload",
            f"in its place: {ACTOR}.megatron.param_offload, which moves the gradients too",
        ),
        ("0.7.1", "critic.fsdp.turbo_config", "which came in 0.9.1"),
    ],
)
def test_a_key_that_moved_is_told_where_to(release: str, key: str, said: str) -> None:
    engine = "--config-name=ppo_megatron_trainer" if "megatron" in key else "algorithm.adv_estimator=gae"
    stated = f"# verl=={release}\n" if release else ""
    config = read_text(f"{stated}python3 -m verl.trainer.main_ppo {engine} {key}=True\n", "run.sh")
    (fault,) = (each for each in config.faults if each.rule == "verl-key-release")
    assert fault.text.endswith(said)


def test_overrides_on_top_of_a_script_close_nothing() -> None:
    script = Source("run.sh", f"python3 -m verl.trainer.main_ppo {ACTOR}.strategy=fsdp2\n")
    config = read_sources([script], overrides=[f"{FSDP}.offload_policy=True {FSDP}.param_offload=True"])
    assert found(config) == {"verl-policy-overrides"}


def test_megatrons_own_rules_read_what_goes_on_to_megatron() -> None:
    config = verl(
        "--config-name=ppo_megatron_trainer",
        f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
        f"+{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction=1.0",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
        f"+{ACTOR}.megatron.override_transformer_config.cpu_offloading=True",
        f"+{ACTOR}.megatron.override_transformer_config.cpu_offloading_num_layers=2",
    )
    verdict = {finding.rule: finding for finding in lint(config).findings}
    assert {"verl-hdo-masters", "la-pp"} <= verdict.keys()
    assert (
        "oc-precision-aware-missing-bridge" not in verdict
    )  # verl loads the weights before the optimizer is made
    assert "override_transformer_config.cpu_offloading=true" in verdict["la-pp"].message


def test_a_fix_writes_the_plus_that_hydra_asks_for() -> None:
    config = verl(
        "model_engine=megatron", f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True"
    )
    (finding,) = (
        each for each in with_remedies(lint(config), config).findings if each.rule == "verl-hdo-masters"
    )
    added = [line[1:] for line in finding.fix.diff.splitlines() if line.startswith("+")]
    assert f"+{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer=true" in added
    assert not verl("model_engine=megatron", *added).unknown


def test_no_plan_is_made_beside_a_rollout_engine() -> None:
    text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B {ACTOR}.strategy=fsdp2\n"
    config = read_text(text, "run.sh")
    assert config.model_name == "Qwen/Qwen3-8B"
    with pytest.raises(UnusableInput, match="shares each GPU"):
        registry.named("verl").run(config, None, gpus=8)  # type: ignore[arg-type]


def test_what_the_models_provider_decides_is_open_under_megatron() -> None:
    config = verl("model_engine=megatron")
    assert "num_moe_experts" in config.maybe_set
    assert "use_distributed_optimizer" not in config.maybe_set


def test_without_megatron_its_rules_do_not_apply() -> None:
    config = verl(
        f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", f"{ACTOR}.strategy=fsdp"
    )
    assert not config.shares
    assert not found(config)


def test_yaml_of_the_same_keys() -> None:
    text = "defaults: [ppo_trainer, _self_]\ntrainer: {nnodes: 1}\nactor_rollout_ref:\n  actor:\n    strategy: fsdp2\n"
    text += "    fsdp_config: {offload_policy: true, optimizer_offload: true}\n"
    config = read_text(text, "run.yaml")
    assert config.framework == "verl"
    assert found(config) == {"verl-policy-overrides"}


def test_yaml_over_a_base_that_is_not_here() -> None:
    text = "defaults: [mine, _self_]\ntrainer: {}\nactor_rollout_ref: {actor: {fsdp_config: {offload_policy: true}}}\n"
    assert not found(read_text(text, "run.yaml"))


def test_python_is_refused() -> None:
    with pytest.raises(UnusableInput, match="is Python"):
        read_text("import verl\n", "main.py", framework="verl")


REF = "actor_rollout_ref.ref.fsdp_config"


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (f"{ACTOR}.strategy=megatron {ACTOR}.megatron.param_offload=True", True),
        (f"--config-name=ppo_megatron_trainer {ACTOR}.fsdp_config.param_offload=True", True),
        (f"model_engine=veomni {ACTOR}.fsdp_config.param_offload=True", True),
        (f"model_engine=megatron {ACTOR}.megatron.param_offload=True", False),
        (f"model_engine=$ENGINE {ACTOR}.megatron.param_offload=True", False),
        (f"actor@actor_rollout_ref.actor=megatron_actor {ACTOR}.megatron.param_offload=True", False),
        (f"--config-name=mine {ACTOR}.megatron.param_offload=True", False),
        (f"{ACTOR}.strategy=megatron +{ACTOR}.megatron.param_offload=True", False),
        (f"model_engine=veomni +{REF}.reshard_after_forward=0 ~{REF}.reshard_after_forward", False),
        (f"model_engine=veomni +{REF}.reshard_after_forward=0 ~{REF}.param_offload", True),
        (
            f"model_engine=torchtitan +{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",
            True,
        ),
        (f"model_engine=megatron +{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", False),
        (f"model_engine=torchtitan +{ACTOR}.optim.override_optimizer_configs=1", False),
    ],
)
def test_a_key_of_another_engine_is_refused(words: str, is_refused: bool) -> None:
    config = read_text(f"python3 -m verl.trainer.main_ppo {words}\n", "run.sh")
    assert ("verl-other-engine" in found(config)) is is_refused


def test_a_fork_may_have_the_sections_of_two_engines(tmp_path: Path) -> None:
    actor = tmp_path / "verl" / "trainer" / "config" / "actor"
    actor.mkdir(parents=True)
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {ACTOR}.megatron.param_offload=True\n")
    faults = []
    for text in (
        "fsdp_config: {}\n",
        "defaults: [../engine@fsdp_config: fsdp, ../engine@megatron: megatron]\n",
    ):
        (actor / "dp_actor.yaml").write_text(text)
        faults.append("verl-other-engine" in found(read([script])))
    assert faults == [True, False]


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        (f"+{ACTOR}.fsdp_config.param_offload=True", True),
        ("+actor_rollout_ref.model.enable_gradient_checkpointing=True", True),
        (f"model_engine=megatron +{ACTOR}.megatron.param_offload=True", True),
        (f"++{ACTOR}.fsdp_config.param_offload=True", False),
        (f"{ACTOR}.fsdp_config.param_offload=True", False),
        (f"~{ACTOR}.fsdp_config +{ACTOR}.fsdp_config.param_offload=True", False),
        (f"+{ACTOR}.fsdp_config.param_offload=$OFFLOAD", False),
        (f"model_engine=megatron +{ACTOR}.fsdp_config.param_offload=True", False),
        (f"model_engine=$ENGINE +{ACTOR}.fsdp_config.param_offload=True", False),
        (f"--config-name=mine +{ACTOR}.fsdp_config.param_offload=True", False),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4", False),
    ],
)
def test_a_plus_before_a_key_with_a_value_is_refused(words: str, is_refused: bool) -> None:
    config = read_text(f"python3 -m verl.trainer.main_ppo {words}\n", "run.sh")
    assert ("verl-plus-existing" in found(config)) is is_refused


def test_another_program_or_a_fork_has_a_configuration_of_its_own(tmp_path: Path) -> None:
    words = f"+{ACTOR}.fsdp_config.param_offload=True\n"
    assert "verl-plus-existing" not in found(
        read_text(f"python3 -m recipe.dapo.main_dapo {words}", "run.sh", framework="verl")
    )
    (tmp_path / "verl" / "trainer" / "config").mkdir(parents=True)
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {words}")
    assert "verl-plus-existing" not in found(read([script]))


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (f"--{FSDP}.param_offload=True", "verl-override-refused"),
        (f"{FSDP}.param_offload", "verl-override-refused"),
        (f"~{FSDP}.param_offload=True", "verl-override-refused"),
        (f"{FSDP}=null {FSDP}.param_offload=True", "verl-override-refused"),
        (f"{FSDP}={{param_ofload:true}}", "verl-unknown-key"),
        (f"{FSDP}.param_offload={{a:1}}", None),
        (f"~{FSDP}.param_offload=False", None),
        (f"{FSDP}={{param_offload:true}}", None),
    ],
)
def test_what_the_campaign_found_of_overrides(words: str, rule: str | None) -> None:
    rules = {"verl-override-refused", "verl-unknown-key"} & found(verl(words))
    assert rules == ({rule} if rule else set())


def test_an_engine_that_the_release_does_not_have_is_refused() -> None:
    for release, lacks in (("0.7.1", True), ("0.8.0", False)):
        config = read_text(
            f"# verl=={release}\npython3 -m verl.trainer.main_ppo model_engine=megatron\n", "run.sh"
        )
        assert ("verl-key-release" in found(config)) is lacks


def test_a_section_that_verl_never_had_is_a_fork_s() -> None:
    verl = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.fsdp_config.param_offload=True"
    unknown = {
        word: [each.written for each in read_text(f"{verl} {word}\n", "run.sh").unknown]
        for word in ("env.max_steps=30", "actor_rolout_ref.actor.strategy=fsdp2", "trainer.nodes=2")
    }
    assert unknown == {
        "env.max_steps=30": [],
        "actor_rolout_ref.actor.strategy=fsdp2": ["actor_rolout_ref.actor.strategy"],
        "trainer.nodes=2": ["trainer.nodes"],
    }
