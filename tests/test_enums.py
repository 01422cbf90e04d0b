"""`extend_str_enum` on every Python found; it needs no torch, so they do not have to have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import every_python, run_script

import bnb_fsdp

ENUMS = Path(bnb_fsdp.__file__).parent / "integrations" / "enums.py"

LOAD = f"""
import copy, enum, importlib.util, json, pickle, sys
spec = importlib.util.spec_from_file_location("enums", {str(ENUMS)!r})
enums = importlib.util.module_from_spec(spec)
spec.loader.exec_module(enums)
extend = enums.extend_str_enum

def raises(kind, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{{kind.__name__}} not raised")

class Explicit(str, enum.Enum):
    @classmethod
    def _missing_(cls, value):
        raise ValueError(f"{{value}} is none of {{list(cls._value2member_map_.keys())}}")

class Names(Explicit):
    OLD = "old"
    OTHER = "other"
"""

# The oracle is a class whose body already has the member: nothing may tell the two classes apart.
TWIN = """
def kinds():
    class Plain(str, enum.Enum):
        OLD = "old"
    class PlainTwin(str, enum.Enum):
        OLD = "old"
        NEW_ONE = "new_one"
    yield Plain, PlainTwin
    class Init(str, enum.Enum):
        def __init__(self, value):
            self.size = len(value)
        OLD = "old"
    class InitTwin(str, enum.Enum):
        def __init__(self, value):
            self.size = len(value)
        OLD = "old"
        NEW_ONE = "new_one"
    yield Init, InitTwin
    class New(str, enum.Enum):
        def __new__(cls, value):
            member = str.__new__(cls, value)
            member._value_ = value
            member.tag = "tag of " + value
            return member
        OLD = "old"
    class NewTwin(str, enum.Enum):
        __new__ = New.__new_member__
        OLD = "old"
        NEW_ONE = "new_one"
    yield New, NewTwin
    if hasattr(enum, "StrEnum"):
        class Strings(enum.StrEnum):
            OLD = "old"
        class StringsTwin(enum.StrEnum):
            OLD = "old"
            NEW_ONE = "new_one"
        yield Strings, StringsTwin

def facts(cls):
    def plain(value):
        return repr(value).replace(cls.__name__, "X")
    names = [key for key in vars(cls) if ("member" in key or "hashable" in key) and "new_member" not in key]
    tables = {key: plain(vars(cls)[key]) for key in names}
    member = cls.NEW_ONE
    return {
        "tables": tables,
        "member": {k: plain(v) for k, v in vars(member).items()},
        "list": plain(list(cls)),
        "reversed": plain(list(reversed(cls))),
        "members": plain(dict(cls.__members__)),
        "len": len(cls), "dir": sorted(dir(cls)), "class attributes": sorted(vars(cls)),
        "str": plain(str(member)), "format": plain(format(member)), "repr": plain(member),
        "json": json.dumps(member),
        "hash": hash(member) == hash("new_one"), "equal": member == "new_one", "upper": member.upper(),
    }

for extended, twin in kinds():
    member = extend(extended, "new_one")
    assert type(member) is extended and extended.NEW_ONE is member, extended
    mine, wanted = facts(extended), facts(twin)
    for key in wanted:
        assert mine[key] == wanted[key], (extended, key, mine[key], wanted[key])
"""

USE = """
member = extend(Names, "new_one")
assert Names("new_one") is Names["NEW_ONE"] is Names.NEW_ONE is member
assert [m.value for m in Names] == ["old", "other", "new_one"] and len(Names) == 3
assert member in Names and member.name == "NEW_ONE" and member.value == "new_one"
assert repr(member) == "<Names.NEW_ONE: 'new_one'>"
assert {"new_one": 1}[member] == 1 and {member: 1}["new_one"] == 1
if sys.version_info >= (3, 12):
    assert "new_one" in Names and "none" not in Names
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    assert pickle.loads(pickle.dumps(member, protocol)) is member
assert copy.copy(member) is member and copy.deepcopy([member])[0] is member
assert "new_one" in raises(ValueError, Names, "none")
raises(AttributeError, setattr, Names, "NEW_ONE", 1)
raises(AttributeError, delattr, Names, "NEW_ONE")
raises(KeyError, lambda: Names["NONE"])
raises(TypeError, exec, "class Sub(Names): pass", globals())
assert Names.OLD is Names("old") and Names.OLD == "old"
"""

AGAIN = """
member = extend(Names, "new_one")
assert extend(Names, "new_one") is member and extend(Names, "old") is Names.OLD and len(Names) == 3
assert extend(Names, "a-b", "A_B") is Names.A_B and Names("a-b") is Names.A_B and len(Names) == 4
"""

ERRORS = """
class Numbers(enum.IntEnum):
    ONE = 1
class Loose(enum.Enum):
    ONE = "one"
class Odd(str, enum.Enum):
    def __new__(cls, value):
        member = str.__new__(cls, value)
        member._value_ = value + "!"
        return member
    ONE = "one"
for cls in (Numbers, Loose, str, "Names"):
    assert "derives from str" in raises(TypeError, extend, cls, "x")
assert "a str" in raises(TypeError, extend, Names, 3)
for value in ("a-b", "_x_", "", "1"):
    assert "identifier" in raises(ValueError, extend, Names, value)
for name in ("OLD", "upper", "name", "value"):
    assert "already has" in raises(ValueError, extend, Names, "x", name)
assert len(Names) == 2 and list(Names) == [Names.OLD, Names.OTHER]
assert "cannot add TWO = 'two' to Odd" in raises(RuntimeError, extend, Odd, "two")
"""

PROCESSES = """
import subprocess
data = pickle.dumps(extend(Names, "new_one"))
with open(sys.argv[0]) as file:
    top = file.read().partition("import subprocess")[0]
def load(extra):
    code = top + extra + f"print(repr(pickle.loads({data!r})))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
knows, knows_not = load("extend(Names, 'new_one')\\n"), load("")
assert knows.stdout.strip() == "<Names.NEW_ONE: 'new_one'>", knows
assert knows_not.returncode and "new_one is none of ['old', 'other']" in knows_not.stderr, knows_not
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(TWIN, id="indistinguishable-from-a-member-of-the-class-body"),
        pytest.param(USE, id="lookup-iteration-pickle-copy"),
        pytest.param(AGAIN, id="idempotent"),
        pytest.param(ERRORS, id="errors-change-nothing"),
        pytest.param(PROCESSES, id="pickle-loads-where-the-member-is-known"),
    ],
)
@every_python
def test_extended_enum(python: str, script: str, tmp_path: Path) -> None:
    run_script(python, LOAD + script, tmp_path)
