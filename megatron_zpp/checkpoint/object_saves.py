"""How a save to an object store becomes whole, without renaming anything: docs/internals/checkpoints.md.

A directory without COMMITTED is not a checkpoint. If it has an object `.partial` beside it, the next save
removes it. A `.replacement` counts as soon as the marker of the checkpoint that it replaces is removed.
"""

from megatron_zpp.checkpoint.directory import (
    PARTIAL,
    REPLACEMENT,
    aside,
    committed,
    iteration_of,
    remove_committed,
)
from megatron_zpp.checkpoint.manifest import is_committed
from megatron_zpp.storage.objects.path import ObjectPath


def begin_save(final: ObjectPath) -> ObjectPath:
    """Return the directory to write the checkpoint to; removes leftovers of killed saves first."""
    remove_leftovers(final.parent)
    place = aside(final, REPLACEMENT) if is_committed(final) else final
    aside(place, PARTIAL).write(b"")
    place.remove_tree()  # a checkpoint that has lost its marker, as far as anything is there
    return place


def end_save(place: ObjectPath, final: ObjectPath) -> None:
    """Make the committed checkpoint at `place` the only one of its iteration."""
    other = aside(final, REPLACEMENT) if place == final else final
    if is_committed(other):
        remove_committed(other)
    place.abort_uploads()  # which were begun twice, because the answer to the first request was lost
    aside(place, PARTIAL).unlink()


def discard_save(final: ObjectPath) -> None:
    """Remove what a failed save has written, except the `.partial`: a slow rank may still write.

    Nothing is removed if the failure came after the marker was written.
    """
    for place in (final, aside(final, REPLACEMENT)):
        if aside(place, PARTIAL).is_file() and not is_committed(place):
            place.remove_tree()


def remove_leftovers(directory: ObjectPath) -> None:
    """Remove what saves and removals that were killed have left in the directory of checkpoints."""
    for unfinished in directory.glob("iter_*.partial"):
        place = unfinished.with_name(unfinished.name.removesuffix(PARTIAL))
        iteration = iteration_of(place)
        if iteration is None:
            continue
        there = committed(directory).get(iteration)
        final = place.with_name(place.name.removesuffix(REPLACEMENT))
        other = final if place != final else aside(final, REPLACEMENT)
        if there != place:
            if is_committed(place):  # a replacement: the kill came before the old one was removed
                remove_committed(place)
            place.remove_tree()
        elif is_committed(other):  # the kill came before it was removed
            remove_committed(other)
        unfinished.unlink()
