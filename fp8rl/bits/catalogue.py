"""Real optimizers that a doctor runs beside a script's own, and how they are written.

An entry names an optimizer class of any package, or a short name for a usual one:

    model=bf16                        the script's own optimizer on parameters in bfloat16, as after
                                      `model.bfloat16()`, in the implementation that it chooses
    model=bf16:fused                  the same with fused=True; also `foreach` and `loop`
    optimizer=torchao-8bit            a short name (CATALOGUE)
    optimizer=torchao.optim:AdamW8bit:block_size=128
                                      a class with an option; options are Python literals
    optimizer=torch.optim:Adam:bf16:fused
                                      a class on parameters in bfloat16

These words may follow:

    bf16, fp16             the parameters are kept in this type, without a float32 copy
    fused, foreach, loop   implementation of torch's own optimizers: fused=True, foreach=True, or
                           both False
    eager                  functions that the optimizer compiles are run without the compiler
    name=value             an option of the class

Nothing here imports torch, so that the doctor's command can be checked before its script runs.
"""

import ast
import importlib.metadata
import importlib.util
from typing import NamedTuple

PLACES = ("model", "optimizer")
TYPES = ("bf16", "fp16")
IMPLEMENTATIONS = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "loop": {"fused": False, "foreach": False},
}
WORDS = (*TYPES, *IMPLEMENTATIONS, "eager")


class Stack(NamedTuple):
    """A usual optimizer of a package, with the classes that stand for torch's own.

    `package`  name for pip
    `module`   module that has the classes
    `classes`  name of the class by the name of torch's class whose place it takes
    `words`    words of the entry that the short name stands for
    `meaning`  what it does, in a few words
    """

    package: str
    module: str
    classes: dict[str, str]
    words: tuple[str, ...]
    meaning: str


CATALOGUE = {
    "torchao-8bit": Stack(
        "torchao",
        "torchao.optim",
        {"Adam": "Adam8bit", "AdamW": "AdamW8bit"},
        (),
        "both moments in 8 bits, with a scale for each 256 numbers",
    ),
    "torchao-4bit": Stack(
        "torchao",
        "torchao.optim",
        {"Adam": "Adam4bit", "AdamW": "AdamW4bit"},
        (),
        "both moments in 4 bits, with a scale for each 128 numbers",
    ),
    "torchao-fp8": Stack(
        "torchao",
        "torchao.optim",
        {"Adam": "AdamFp8", "AdamW": "AdamWFp8"},
        (),
        "both moments in e4m3, with a scale for each 256 numbers",
    ),
    "torchao-stochastic": Stack(
        "torchao",
        "torchao.optim",
        {"AdamW": "_AdamW"},
        ("bf16", "bf16_stochastic_round=True"),
        "parameters in bfloat16, rounded stochastically; moments in bfloat16",
    ),
    "torchao-8bit-stochastic": Stack(
        "torchao",
        "torchao.optim",
        {"Adam": "Adam8bit", "AdamW": "AdamW8bit"},
        ("bf16", "bf16_stochastic_round=True"),
        "parameters in bfloat16, rounded stochastically; moments in 8 bits",
    ),
    "bnb-8bit": Stack(
        "bitsandbytes",
        "bitsandbytes.optim",
        {
            "Adam": "Adam8bit",
            "AdamW": "AdamW8bit",
            "SGD": "SGD8bit",
            "RMSprop": "RMSprop8bit",
            "Adagrad": "Adagrad8bit",
        },
        (),
        "moments in 8 bits, with a scale for each 256 numbers",
    ),
    "optimi-kahan": Stack(
        "torch-optimi",
        "optimi",
        {"Adam": "Adam", "AdamW": "AdamW", "SGD": "SGD", "RAdam": "RAdam"},
        ("bf16",),
        "parameters and moments in bfloat16, with a Kahan sum for the parameters",
    ),
    "heavyball": Stack(
        "heavyball",
        "heavyball",
        {"AdamW": "AdamW", "SGD": "SGD"},
        ("bf16",),
        "parameters and moments in bfloat16, rounded stochastically",
    ),
    "schedulefree": Stack(
        "schedulefree",
        "schedulefree",
        {"AdamW": "AdamWScheduleFree", "SGD": "SGDScheduleFree"},
        (),
        "no schedule: the weights that are evaluated are an average",
    ),
}


class RealOptimizer(NamedTuple):
    """An entry, read.

    `text`     the entry as it was written, such as "optimizer=torchao-8bit"
    `module`   the module that has the class; empty for the script's own class
    `classes`  name of the class by the name of torch's class whose place it takes; an explicit
               class takes any place and has the key ""
    `type`     "bf16" or "fp16" for the type of the parameters; empty for their own
    `options`  options of the class
    `eager`    whether the compiler is left out
    """

    text: str
    module: str
    classes: dict[str, str]
    type: str
    options: dict[str, object]
    eager: bool


def is_real(text: str) -> bool:
    """Whether an entry names a real optimizer."""
    return text.partition("=")[0] in PLACES


def split_real(formats: str) -> tuple[str, list[str]]:
    """The entries of a text that name places and formats, as one text, and those that name real
    optimizers."""
    entries = formats.split()
    emulated = " ".join(text for text in entries if not is_real(text))
    return emulated, [text for text in entries if is_real(text)]


def read_real_optimizer(text: str) -> RealOptimizer:
    """Reads an entry such as "optimizer=torchao-8bit" or "model=bf16:fused".

    Raises ValueError, with a message of one line, for an entry that cannot be read, and where its
    package is not installed.
    """
    place, _, description = text.partition("=")
    first, *words = description.split(":")
    if place == "model":
        if first not in TYPES:
            raise ValueError(f"formats has {text!r}: write model=bf16 or model=fp16")
        return read_words(text, "", {}, [first, *words])
    # Some packages have the name of a short name, as in optimizer=heavyball:SOAP
    names_class = bool(words) and words[0].isidentifier() and words[0] not in WORDS
    if first in CATALOGUE and not names_class:
        stack = CATALOGUE[first]
        require_package(text, stack.module, stack.package)
        return read_words(text, stack.module, stack.classes, [*stack.words, *words])
    if not words or not all(part.isidentifier() for part in (*first.split("."), words[0])):
        raise ValueError(
            f"formats has {text!r}: write optimizer=module:Class, "
            f"or one of the names {', '.join(CATALOGUE)}"
        )
    require_package(text, first, "")
    return read_words(text, first, {"": words[0]}, words[1:])


def read_words(text: str, module: str, classes: dict, words: list[str]) -> RealOptimizer:
    """Reads the words after a class. Raises ValueError for a word that does not exist."""
    kept_type = ""
    options: dict[str, object] = {}
    eager = False
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            options[name] = literal(value)
        elif word in TYPES:
            kept_type = word
        elif word in IMPLEMENTATIONS:
            options |= IMPLEMENTATIONS[word]
        elif word == "eager":
            eager = True
        else:
            raise ValueError(f"formats has {text!r}: use only {', '.join(WORDS)} or option=value")
    return RealOptimizer(text, module, classes, kept_type, options, eager)


def literal(value: str):
    """A Python literal, or the text itself if it is none."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def require_package(text: str, module: str, package: str) -> None:
    """Raises ValueError if a module is not installed. It is not imported."""
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        remedy = f": pip install {package}" if package else ""
        raise ValueError(f"formats has {text!r}: the package {root} is not installed{remedy}")


def catalogue_as_text() -> str:
    """A line for each short name: what it stands for, and whether its package is installed."""
    lines = [
        "model=bf16  the script's own optimizer on parameters in bfloat16, as after "
        "model.bfloat16(); also model=fp16, and :fused, :foreach or :loop for its implementation"
    ]
    for name, stack in CATALOGUE.items():
        try:
            state = f"{stack.package} {importlib.metadata.version(stack.package)} is installed"
        except importlib.metadata.PackageNotFoundError:
            state = f"pip install {stack.package}"
        takes_place = ", ".join(stack.classes)
        lines.append(f"optimizer={name}  {stack.meaning}; for {takes_place} ({state})")
    lines.append(
        "optimizer=module:Class  any other class, with words and options, as in "
        "optimizer=torch.optim:Adam:bf16:fused or optimizer=torchao.optim:AdamW8bit:block_size=128"
    )
    return "\n".join(lines)
