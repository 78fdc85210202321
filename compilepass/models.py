"""The models that commands run: a Hugging Face architecture, or a function of the user's.

    hf:llama                       random weights, a few small layers; nothing is downloaded
    package.module:function        function(**settings) -> (model, inputs)
    path/to/file.py:function

``inputs`` are a tuple of arguments or a dict of keywords. A target is built anew for each policy.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .config import work_offline
from .errors import ConfigError, did_you_mean

__all__ = ["DTYPES", "Target", "build", "next_token", "parse_settings"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: What is set for a Hugging Face config that has the field and that no setting names. The usual
#: special tokens are not in so small a vocabulary.
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    # encoders and decoders side by side, vision, and speech
    "d_ff": 128,
    "d_kv": 16,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_source_positions": 16,
    "image_size": 32,
    "patch_size": 8,
}

Built = tuple[Callable[..., Any], Sequence[Any] | Mapping[str, Any]]


@dataclass(frozen=True)
class Target:
    """What to build: ``where`` as in the module, ``settings`` for the config or the function.

    ``tokens`` and ``batch`` shape the input of a Hugging Face model; a function gets them, and
    ``dtype``, as arguments of these names. ``None`` leaves each to its default.
    """

    where: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    tokens: int | None = None
    batch: int | None = None


def build(target: Target) -> Built:
    """The model and its inputs, the same weights each time.

    Raises :class:`ConfigError` for a target or a setting that does not exist.
    """
    kind, separator, name = target.where.rpartition(":")
    if not separator or not kind or not name:
        raise ConfigError(
            f"{target.where!r} is not a model",
            why="A model is named by its type or by the function that builds it.",
            hint="Write hf:llama, package.module:function or path/to/file.py:function.",
        )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return _hugging_face(name, target) if kind == "hf" else _function(kind, name, target)


def next_token(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the step after ``inputs``: one token, and the cache that those have filled."""
    model.config.use_cache = True
    before = model(**inputs, use_cache=True)
    token = inputs["input_ids"][:, -1:]
    return {"input_ids": token, "past_key_values": before.past_key_values, "use_cache": True}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """``["hidden_size=64"]`` as a dict; a value is a Python literal, else text."""
    settings = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(
                f"{word!r} is not a setting", hint="Write name=value, such as hidden_size=64."
            )
        try:
            settings[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[name] = text
    return settings


def _hugging_face(model_type: str, target: Target) -> Built:
    work_offline()
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as LMS
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES as MODELS
    except ImportError as error:
        raise ConfigError(
            f"{target.where} needs transformers, which is not installed",
            why=str(error),
            hint="pip install 'compilepass[models]'",
        ) from error
    if model_type not in LMS and model_type not in MODELS:
        raise ConfigError(
            f"transformers {transformers.__version__} has no model {model_type!r}",
            hint=did_you_mean(model_type, {*LMS, *MODELS}),
        )
    usual = transformers.AutoConfig.for_model(model_type)
    if usual.get_text_config() is not usual and not usual.is_encoder_decoder:
        text_type = usual.get_text_config().model_type
        raise ConfigError(
            f"{model_type} takes more than text",
            why="Only models of one kind of input are built from a type alone.",
            hint=f"Its language model is hf:{text_type}."
            if text_type in LMS
            else "Write a function that builds it, and give file.py:function.",
        )
    fields = {*usual.to_dict(), *usual.attribute_map}
    for name in target.settings:
        if name not in fields:
            raise ConfigError(
                f"the config of {model_type} has no field {name!r}",
                hint=did_you_mean(name, fields),
            )
    settings = _small(fields, target.settings)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    config.use_cache = False
    dtype = target.dtype or torch.float32
    is_lm = model_type in LMS and not config.is_encoder_decoder
    made: Any = transformers.AutoModelForCausalLM if is_lm else transformers.AutoModel
    model = made.from_config(config, dtype=dtype).eval()
    return model, _inputs(target, model, dtype)


def _inputs(target: Target, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random inputs of the one kind that a model of transformers takes."""
    config, batch, length = model.config, target.batch or 1, target.tokens or 32
    main = model.main_input_name

    def tokens() -> torch.Tensor:
        return torch.randint(0, config.get_text_config().vocab_size, (batch, length))

    if main == "pixel_values":
        size = config.image_size
        sizes = (size, size) if isinstance(size, int) else size
        return {main: torch.randn(batch, config.num_channels, *sizes).to(dtype)}
    if main == "input_features":  # a spectrogram, halved by a convolution
        frames = 2 * config.max_source_positions
        features = torch.randn(batch, config.num_mel_bins, frames).to(dtype)
        return {main: features, "decoder_input_ids": tokens()}
    if main != "input_ids":
        raise ConfigError(
            f"{target.where} takes {main}",
            why="Random inputs are made of token ids, pixel values and spectrograms only.",
            hint="Write a function that builds it, and give file.py:function.",
        )
    ids = {main: tokens()}
    return {**ids, "decoder_input_ids": tokens()} if config.is_encoder_decoder else ids


def _small(fields: set[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``settings``, and for those of ``fields`` that they leave open what makes the model small."""
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    chosen = {**special, **{n: v for n, v in _SMALL.items() if n in fields}, **settings}
    heads = chosen.get("num_attention_heads")
    if "kv_lora_rank" in fields:  # latent attention: every head has keys of its own
        chosen["num_key_value_heads"] = heads
    elif "head_dim" in fields and heads and "hidden_size" in chosen:
        chosen.setdefault("head_dim", chosen["hidden_size"] // heads)
    return chosen


def _function(place: str, name: str, target: Target) -> Built:
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"{place} has no function {name!r}",
            hint=did_you_mean(name, [n for n, v in vars(module).items() if inspect.isfunction(v)]),
        )
    options = {"dtype": target.dtype, "tokens": target.tokens, "batch": target.batch}
    settings = {**target.settings, **{n: v for n, v in options.items() if v is not None}}
    try:
        inspect.signature(function).bind(**settings)
    except TypeError as error:
        raise ConfigError(
            f"{target.where} cannot be called with {', '.join(settings) or 'no arguments'}",
            why=f"{error}; it is {name}{inspect.signature(function)}",
            hint="Give its arguments with --set name=value.",
        ) from error
    built = function(**settings)
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]):
        raise ConfigError(
            f"{target.where} returned {type(built).__name__}",
            why="A function that builds a model returns (model, inputs).",
            hint="inputs are a tuple of arguments or a dict of keywords.",
        )
    return built


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does; the installed command does not
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another one that is not
        raise ConfigError(
            f"there is no module {error.name!r}",
            hint="Give a module that can be imported from here, or path/to/file.py:function.",
        ) from error


def _file(path: Path) -> ModuleType:
    """The file as a module, loaded once: what it registers must not be registered again."""
    name = f"compilepass_target_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path.resolve()):
        return known
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"there is no file {str(path)!r}", hint="Give the path of a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
