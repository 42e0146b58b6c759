# SPDX-License-Identifier: Apache-2.0
"""OneTrainer as a dialect: the JSON that its window saves and scripts/train.py trains.

Each part of a model (transformer, text encoders) says for itself which share of it leaves the GPU. The checks ask about
the model type's parts, so the reader finds the part of each check, and gives it a key of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.yaml_lines import plain
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.block_swap import ONETRAINER

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.block_swap.on_host import OnHost

_METHODS = frozenset({"FINE_TUNE", "LORA", "EMBEDDING", "FINE_TUNE_VAE"})
_OWN_DTYPE = 10  # the version from which on a part without a dtype of its own is fp32
_PER_PART = 11  # the version of a file from which on each part has its own offload
_UNET_AND_ONE = (("unet", "text_encoder", "vae"), ())
_UNET_AND_TWO = (("unet", "text_encoder", "text_encoder_2", "vae"), ())
_TWO = ("transformer", "text_encoder", "vae")
_THREE = ("transformer", "text_encoder", "text_encoder_2", "vae")
_FOUR = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "vae")
_FIVE = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "vae")
_CASCADE = ("prior", "text_encoder", "effnet_encoder", "decoder", "decoder_vqgan")
_PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            *("STABLE_DIFFUSION_15", "STABLE_DIFFUSION_15_INPAINTING", "STABLE_DIFFUSION_20"),
            *("STABLE_DIFFUSION_20_BASE", "STABLE_DIFFUSION_20_INPAINTING", "STABLE_DIFFUSION_20_DEPTH"),
            *("STABLE_DIFFUSION_21", "STABLE_DIFFUSION_21_BASE"),
        ),
        _UNET_AND_ONE,
    ),
    "STABLE_DIFFUSION_XL_10_BASE": _UNET_AND_TWO,
    "STABLE_DIFFUSION_XL_10_BASE_INPAINTING": _UNET_AND_TWO,
    **dict.fromkeys(
        ("STABLE_DIFFUSION_3", "STABLE_DIFFUSION_35"), (_FOUR, ("transformer", "text_encoder_3"))
    ),
    "WUERSTCHEN_2": ((*_CASCADE[:4], "decoder_text_encoder", "decoder_vqgan"), ()),
    "STABLE_CASCADE_1": (_CASCADE, ()),
    **dict.fromkeys(("FLUX_DEV_1", "FLUX_FILL_DEV_1"), (_THREE, ("transformer", "text_encoder_2"))),
    "HUNYUAN_VIDEO": (_THREE, ("transformer", "text_encoder")),
    "HI_DREAM_FULL": (_FIVE, ("transformer", "text_encoder_3", "text_encoder_4")),
    **dict.fromkeys(
        (
            *(
                "PIXART_ALPHA",
                "PIXART_SIGMA",
                "FLUX_2",
                "ANIMA",
                "SANA",
                "CHROMA_1",
                "QWEN",
                "KREA_2",
                "Z_IMAGE",
            ),
            "ERNIE",
        ),
        (_TWO, ("transformer", "text_encoder")),
    ),
    "IDEOGRAM_4": (
        (*_TWO[:2], "unconditional_transformer", "vae"),
        ("transformer", "text_encoder", "unconditional_transformer"),
    ),
}  # the parts of each model, and those with layers that can leave the GPU; modules/util/enum/ModelType.py, modelSetup/
# Those that older versions have.
_EVERY_PART = {part for parts, _ in _PARTS.values() for part in parts} - {"unconditional_transformer"}
_MAY_BE_LEFT_OUT = frozenset(
    {
        "STABLE_DIFFUSION_3",
        "STABLE_DIFFUSION_35",
        "FLUX_DEV_1",
        "FLUX_FILL_DEV_1",
        "HUNYUAN_VIDEO",
        "HI_DREAM_FULL",
    }
)  # whose text encoders `include` leaves out; all other loaders pass it by


class _Part(NamedTuple):
    """A part of the model: the share of its layers on the host, and the other fields that the checks read."""

    name: str
    layers: Setting | None
    activations: Setting | None
    trains: bool
    checkpointing: Setting | None
    checkpoints: bool
    can_offload: bool
    is_loaded: bool


class OneTrainer(Dialect):
    """OneTrainer. A file of an older version is migrated as it is loaded, and so it is here."""

    name = ONETRAINER
    label = "OneTrainer"
    package = "modules"
    looks_for = "training_method beside model_type, both of OneTrainer's names"
    marks = ("training_method",)
    example_file = "config.json"
    form = "in the JSON"
    language = "json"
    takes_new_keys = False
    no_plan = "activations of images depend on size and buckets, which the concepts have"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a method and a model type under the names that this trainer alone has for them."""
        method, model = (
            plain(entries[name]) if name in entries else None for name in ("training_method", "model_type")
        )
        proven = isinstance(method, str) and method in _METHODS and isinstance(model, str) and model in _PARTS
        return (
            Evidence(1, certain=True, proof=f"training_method {method}, model_type {model}")
            if proven
            else NONE
        )

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read a preset and a configuration, one above the other, then `KEY=VALUE`, as --config-value takes it."""
        draft = Draft(ONETRAINER)
        draft.complete = True
        for source in sources:
            if source.kind is not Kind.JSON:
                raise source.refused(
                    expected="a preset or configuration of OneTrainer",
                    attempt="the JSON that its window saves (export)",
                )
            draft.take(source)
            root = single_document(source)
            version = entries_of(root).get("__version")
            is_old = version is not None and isinstance(version.value, int) and version.value < _PER_PART
            write_tree(draft, root, source.name, report_unknown=not is_old)
            if version is not None:
                draft.set("__version", plain(version), Place(source.name, version.line, version.column))
            _migrate(draft, entries_of(root))
        for text in overrides:
            key, _, value = text.partition("=")
            draft.set(key, value, Place("<overrides>", 1, 1))
        _find_parts(draft)
        return draft.finish()

    def block_swap(self, config: Config) -> "OnHost":
        """Return the layers of the model that a LoRA is trained for."""
        from skill_tools.dialects.block_swap.shares import of_config

        return of_config(config)

    def rule_for_type(self, key: "Key | None") -> str:
        """A value that does not convert is printed and dropped."""
        return "ot-not-set"

    def rule_for_unknown(self, unknown: object) -> str:
        """A name that no field has is dropped without a word."""
        return "ot-unknown-name"


def _migrate(draft: Draft, entries: "Mapping[str, Node]") -> None:
    """Bring the settings of the whole model, which files had before version 11, to its parts.

    A file without a version is a preset, which is loaded as it is. Of the optimizer's fields a preset may
    leave the rest to `optimizer_defaults`, which the window looks up and scripts/train.py does not.
    """
    version = plain(entries["__version"]) if "__version" in entries else None
    if not isinstance(version, int):
        if "optimizer_defaults" in entries:
            draft.keys_may_be_set(
                f"onetrainer.{name}"
                for name in ("fused_back_pass", "fused", "foreach", "stochastic_rounding")
            )
        return
    if version >= _PER_PART:
        return
    if version < _OWN_DTYPE and "weight_dtype" in entries:
        of_all = entries["weight_dtype"]
        place = Place(next(reversed(draft.sources)), of_all.line, of_all.column)
        for name in _EVERY_PART:
            own = draft.get(f"{name}.weight_dtype")
            if own is not None and own.value == "NONE":
                draft.set_key(own.key, plain(of_all), "weight_dtype", place)
    model = draft.get("onetrainer.model_type")
    renamed = version < 9 and not (model and model.value in ("WUERSTCHEN_2", "STABLE_CASCADE_1"))
    for setting in draft.below("prior.") if renamed else ():
        name = setting.key.replace("prior.", "transformer.", 1)
        draft.set_key(name, setting.value, setting.written, setting.place)
    method = draft.get("onetrainer.gradient_checkpointing")
    share, activations = (
        draft.get(f"onetrainer.{name}") for name in ("layer_offload_fraction", "enable_activation_offloading")
    )
    offloads = version > 4 and method is not None and method.value == "CPU_OFFLOADED"  # before, it was a bool
    for part in sorted(_EVERY_PART & (entries.keys() | ({"transformer"} if renamed else set()))):
        _say(draft, f"{part}.offload_fraction", share, share.value if share and offloads else 0.0)
        on = method is None or (method.value != "OFF" if version > 4 else bool(method.value))
        _say(draft, f"{part}.gradient_checkpointing", method, on)
        moved = offloads and (activations is None or bool(activations.value))
        _say(draft, f"{part}.activation_offloading", method, moved)


def _say(draft: Draft, name: str, source: Setting | None, value: object) -> None:
    """Give a part the value that a setting of the whole model implies; without that setting, its default."""
    written, place = (
        (source.written, source.place) if source else (name, Place(next(iter(draft.sources)), 1, 1))
    )
    draft.set_key(name, value, written, place)


def _find_parts(draft: Draft) -> None:
    """Give each part that a check is about a key: its offload, as the file says it."""
    parts = list(_parts(draft))
    encoders = [each for each in parts if each.name.startswith("text_encoder")]
    _note(draft, "text_encoder_offload_fraction", [each.layers for each in encoders])
    _note(draft, "trained_offload_fraction", [each.layers for each in parts if each.trains])
    loaded = [each for each in parts if each.is_loaded]
    moved = [each for each in loaded if each.can_offload and (each.layers or each.activations)]
    _note(
        draft,
        "offloaded_without_checkpointing",
        [each.checkpointing for each in moved if each.trains and not each.checkpoints],
    )
    migrated = draft.get("onetrainer.layer_offload_fraction") is not None
    stays = [each for each in loaded if not each.can_offload and (each is parts[0] or not migrated)]
    _note(draft, "resident_offload", [each.layers or each.activations for each in stays])


def _note(draft: Draft, name: str, found: Sequence[Setting | None]) -> None:
    for setting in found:
        if setting is not None:
            draft.set_key(f"onetrainer.{name}", setting.value, setting.written, setting.place)
            return


def _parts(draft: Draft) -> Iterator[_Part]:
    """Yield the parts that the model has; a file's settings of others count for nothing."""
    model = draft.get("onetrainer.model_type")
    kind = model.value if model and model.value in _PARTS else "STABLE_DIFFUSION_15"
    names, movable = _PARTS[str(kind)]
    for name in names:
        checkpointing = draft.get(f"{name}.gradient_checkpointing")
        unconditional = name == "unconditional_transformer"
        may_be_left_out = unconditional or (kind in _MAY_BE_LEFT_OUT and name.startswith("text_encoder"))
        yield _Part(
            name,
            _above_none(draft, f"{name}.offload_fraction"),
            _true(draft, f"{name}.activation_offloading"),
            _truth(draft.get(f"{name}.train"), not unconditional),
            checkpointing
            or draft.get(f"{name}.offload_fraction")
            or draft.get(f"{name}.activation_offloading"),
            _truth(checkpointing, not unconditional),
            name in movable,
            not may_be_left_out or _truth(draft.get(f"{name}.include"), True),
        )


def _truth(setting: Setting | None, default: bool) -> bool:
    return default if setting is None else bool(setting.value)


def _true(draft: Draft, name: str) -> Setting | None:
    setting = draft.get(name)
    return setting if setting is not None and setting.value else None


def _above_none(draft: Draft, name: str) -> Setting | None:
    """Return the offloaded share of a part, None without offload or for a share that is no number."""
    setting = draft.get(name)
    if setting is None or isinstance(setting.value, list | dict):
        return None
    try:
        value = float(str(setting.value))
    except ValueError:
        draft.refuse_type(name, "a number")
        return None
    return setting._replace(value=value) if value > 0 else None


DIALECT = OneTrainer()
