"""From names in a training framework's state to the names of the Hugging Face model in it."""

from collections.abc import Collection, Mapping

from tidemill.errors import CheckpointError

__all__ = ["matched", "unwrapped"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_SHOWN = 3


def matched(
    names: Collection[str], wanted: Collection[str], tied: Mapping[str, str], prefix: str | None
) -> tuple[str, Mapping[str, str]]:
    """The prefix, and the name there of each of `wanted`, and of those of `tied` that are there beside them.

    `tied` maps further names to those of `wanted` whose tensor they name too; either will do. `prefix` None finds it
    out. Wrappers that torch puts around modules do not count. Raises CheckpointError when names are missing, or when
    two prefixes would do.
    """
    plain = {unwrapped(name): name for name in names}
    known = {name: [name, *(other for other, kept in tied.items() if kept == name)] for name in wanted}
    found = {one: _found(one, plain, known) for one in _prefixes(plain, known, prefix)}
    whole = [one for one, there in found.items() if len(there) == len(known)]
    if len(whole) > 1:
        raise CheckpointError(
            f"the model is there more than once, under {', '.join(map(repr, whole))}; choose one with --prefix"
        )
    if not whole:
        best = max(found, key=lambda one: len(found[one]))
        missing = sorted(best + name for name in known if name not in found[best])
        raise CheckpointError(
            f"{len(missing)} of the model's {len(known)} tensors are missing ({', '.join(missing[:_SHOWN])}); there "
            f"are {len(plain)} tensors ({', '.join(sorted(plain)[:_SHOWN])}); name another --base or --prefix"
        )
    also = {name: plain[whole[0] + name] for name in tied if whole[0] + name in plain}
    return whole[0], {**found[whole[0]], **also}


def unwrapped(name: str) -> str:
    """Without what torch's wrappers put into names."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _found(prefix: str, plain: Mapping[str, str], known: Mapping[str, list[str]]) -> dict[str, str]:
    there = {name: next((prefix + one for one in ones if prefix + one in plain), "") for name, ones in known.items()}
    return {name: plain[one] for name, one in there.items() if one}


def _prefixes(plain: Collection[str], known: Mapping[str, list[str]], prefix: str | None) -> list[str]:
    """What stands before the model's names somewhere."""
    if prefix is not None:
        return [prefix if not prefix or prefix.endswith(".") else f"{prefix}."]
    ends = {one for ones in known.values() for one in ones}
    # Of each name what stands before one of its ends: few, so that a large state takes no long look.
    cuts = [(name, at) for name in plain for at in (0, *(i + 1 for i, letter in enumerate(name) if letter == "."))]
    return sorted({name[:at] for name, at in cuts if name[at:] in ends}) or [""]
