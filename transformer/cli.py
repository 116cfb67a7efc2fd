"""What the commands share: a config from a file or a working directory, overrides from the
command line, and exit code 2 with a plain message for whatever a user got wrong.

`define_config` declares the flags of a config, `main` runs a function once they are read. Values
stay Python literals or text until `spec.parse` judges them all at once.
"""

import contextlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from transformer import spec
from transformer.spec import SpecError

Base = Callable[[], Mapping | ConfigDict]

REFUSED = 2  # exit code: refused before the first step

_OVERRIDE = re.compile(r"--?(no)?config\.([^=]*)(?:=(.*))?", re.DOTALL)
_QUOTED = re.compile(r"""["'\\]*(?:Key ["'\\]+)?(\w+)""")  # the name in a KeyError of a ConfigDict


class Config:
    """A config on its way from the command line; complete once `main` calls the function.

    Attributes:
      value: the config with its overrides, a locked ConfigDict.
      spec: the same, parsed by the class given to `define_config`.
    """

    value: ConfigDict
    spec: Any

    def __init__(self, cls: type, base: Base | None, flag_values):
        self._cls, self._base, self._flags = cls, base, flag_values

    def read(self, argv: list[str]) -> list[str]:
        """Applies the overrides in `argv` (program name first) and returns what else is in it.

        The other flags have been read before. Raises one SpecError that lists every problem of the
        config and of the overrides.
        """
        config: Any = load(self._flags.config) if self._base is None else self._base()
        config = ConfigDict(config, type_safe=False)
        known = spec.defaults(self._cls)
        with config.unlocked():
            _fill(config, known)
        problems, refused = _refusals(self._cls, set(_leaves(known)), argv)
        rest = _apply(config, [a for a in argv if a not in refused and _reachable(config, a)])
        try:
            self.spec = spec.parse(self._cls, config.to_dict())
        except SpecError as e:
            problems += str(e).splitlines()
        spec.refuse(list(dict.fromkeys(problems)))
        self.value = config.lock()
        return rest


def define_config(cls: type, base: Base | None = None, flag_values=flags.FLAGS) -> Config:
    """Declares the flags of a config that the spec `cls` describes.

    A flag `--config=FILE[:argument]` is required, unless `base` says what the overrides
    `--config.section.option=value` start from: a function, called after the other flags are read.
    """
    if base is None:
        flags.DEFINE_string(
            "config",
            None,
            "FILE[:argument], a Python file with get_config([argument]); "
            "--config.section.option=value overrides what it says",
            flag_values=flag_values,
            required=True,
        )
    return Config(cls, base, flag_values)


def main(function: Callable[..., int | None], config: Config | None = None) -> None:
    """Reads the flags, calls `function` with the positional arguments, exits with what it returns.

    Unknown flags, a broken config and a SpecError out of `function` end the program with code 2
    and nothing but the message on stderr; any other exception is a fault and keeps its traceback.
    """
    _keep_compiled()
    app.run(
        lambda arguments: _refusing(function, *arguments),
        flags_parser=lambda argv: _refusing(_read, function, config, argv),
    )


def _keep_compiled() -> None:
    """Keeps compiled programs for the next process, unless the user has said where."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        config.update("jax_compilation_cache_dir", str(home / "transformer-lab" / "xla"))
        config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def load(argument: str) -> Mapping | ConfigDict:
    """The config of `FILE[:argument]`. Raises SpecError naming file and line of what broke."""
    file, *given = argument.split(":", 1)
    if not Path(file).is_file():
        raise SpecError(f"--config={argument}: there is no file {file!r}")
    names: dict[str, Any] = {"__name__": "config", "__file__": file}
    with _blaming(file):
        exec(compile(Path(file).read_bytes(), file, "exec"), names)
    function = names.get("get_config")
    if not callable(function):
        raise SpecError(f"{file}: has no function get_config()")
    try:
        inspect.signature(function).bind(*given)
    except TypeError:
        wants = f"takes no argument, got {given[0]!r}" if given else f"wants one, {file}:ARGUMENT"
        raise SpecError(f"{file}: get_config() {wants}") from None
    with _blaming(file):
        config = function(*given)
    if not isinstance(config, Mapping | ConfigDict):
        raise SpecError(f"{file}: get_config() must return a config, got {config!r}")
    return config


def read_lines(file: str) -> list[str]:
    """The lines of a UTF-8 file, ended by LF or CR LF; no other character ends a line."""
    try:
        text = Path(file).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise SpecError(f"{file}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError as e:
        raise SpecError(f"{file}: not UTF-8 at byte {e.start}") from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def open_output(file: str) -> IO[str]:
    """The file to write results to, before the work that makes them. SpecError if it cannot be."""
    try:
        return Path(file).expanduser().open("w", encoding="utf-8")
    except OSError as e:
        raise SpecError(f"--output={file}: cannot be written ({e.strerror})") from None


class _Literal(flags.ArgumentParser):
    """Reads any value as `spec.literal` does, so that the spec judges its type, not the flag."""

    def parse(self, argument):
        return spec.literal(argument)


def _apply(config: ConfigDict, argv: list[str]) -> list[str]:
    """Sets the overrides of `argv` in `config` and returns the other arguments."""
    for kind in (int, float, bool, tuple, list, type(None)):
        config_flags.register_flag_parser_for_type(kind, _Literal())
    # Flags of their own: `config` is already the name of the flag that holds the file.
    overrides = flags.FlagValues()
    overrides.set_gnu_getopt(True)
    config_flags.DEFINE_config_dict("config", config, flag_values=overrides, sys_argv=argv)
    return _parsed(overrides, argv, known_only=True)


def _read(function: Callable, config: Config | None, argv: list[str]) -> list[str]:
    flags.FLAGS.set_gnu_getopt(True)  # flags may stand after positional arguments
    rest = _parsed(flags.FLAGS, argv, known_only=True)
    if config is not None:
        rest = config.read(rest)
    arguments = _parsed(flags.FLAGS, rest)[1:]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as e:
        if arguments:
            raise SpecError(f"{' '.join(arguments)}: unexpected, flags are --name=value") from None
        raise SpecError(f"arguments: {e}") from None
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING
        logging.get_absl_logger().setLevel("ERROR")  # libraries report every file they write
    return arguments


def _parsed(values: flags.FlagValues, argv: list[str], known_only: bool = False) -> list[str]:
    try:
        return values(argv, known_only=known_only)
    except ValueError as e:  # how absl refuses --noflag=value
        raise SpecError(str(e)) from None


def _refusing(function: Callable, *arguments):
    try:
        return function(*arguments)
    except (SpecError, flags.Error) as e:
        print(e, file=sys.stderr)
        sys.exit(REFUSED)


def _refusals(cls: type, known: set[str], argv: list[str]) -> tuple[list[str], set[str]]:
    """What is wrong with the paths of the overrides, and the arguments that are refused for it."""
    problems, refused, seen = [], set(), {}
    for arg, path, text in _overrides(argv):
        if path not in known:
            nested: Any = text
            for name in reversed(path.split(".")):
                nested = {name: nested}
            try:
                spec.parse(cls, nested)
                problems.append(f"config.{path}: is no option")
            except SpecError as e:
                problems += str(e).splitlines()
            refused.add(arg)
        elif path in seen:
            problems.append(f"config.{path}: given twice, as {seen[path]!r} and as {text!r}")
        seen[path] = text
    return problems, refused


def _overrides(argv: list[str]) -> Iterator[tuple[str, str, str]]:
    """The arguments that override an option, each with its path and its text."""
    for arg, following in zip(argv, [*argv[1:], ""], strict=True):
        if match := _OVERRIDE.fullmatch(arg):
            off, path, text = match.groups()
            yield arg, path, "false" if off else following if text is None else text


def _reachable(config: ConfigDict, arg: str) -> bool:
    """Whether the sections on the way to an override are sections in `config`, too."""
    for _, path, _ in _overrides([arg]):
        section: Any = config
        for name in path.split(".")[:-1]:
            section = section[name]
            if not isinstance(section, ConfigDict):
                return False
    return True


def _fill(config: ConfigDict, known: Mapping) -> None:
    """Adds the options that `config` lacks, where a file has put a section of its own in place."""
    for key, value in known.items():
        if key not in config:
            config[key] = value
        elif isinstance(value, Mapping) and isinstance(section := config[key], ConfigDict):
            _fill(section, value)


def _leaves(known: Mapping, path: str = "") -> Iterator[str]:
    for key, value in known.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


@contextlib.contextmanager
def _blaming(file: str):
    """Turns whatever a config file raises into a SpecError with the line that raised it."""
    try:
        yield
    except Exception as e:
        raise SpecError(f"{_place(e, file)}: {_reason(e)}") from None


def _place(error: Exception, file: str) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    folder = Path(file).resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).resolve().is_relative_to(folder):
            return f"{frame.filename}:{frame.lineno}"
    return file


def _reason(error: Exception) -> str:
    if isinstance(error, SpecError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"not Python, {error.msg}"
    sections = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    name = _QUOTED.match(str(error))
    for section in reversed(sections):
        if isinstance(section, ConfigDict) and name and name[1] not in section:
            return spec.unknown(name[1], list(section), "option")
    return f"{type(error).__name__}: {error}"
