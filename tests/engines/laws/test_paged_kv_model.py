"""The native KV memory does what its plain model does: the same events, the same room, the same refusals."""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrouter._native import PagedKv
from kvrouter.core.events import pack_hashes
from tests.oracles.paged_kv_model import PagedKvModel

HASHES = st.lists(st.integers(1, 3), max_size=6).map(pack_hashes)


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the kind of error that it ends with."""
    try:
        return call()
    except (KeyError, MemoryError) as error:
        return type(error)


class PagedKvMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 12), opaque=st.booleans(), caching=st.sampled_from([True, True, False]))
    def begin(self, total: int, *, opaque: bool, caching: bool) -> None:
        self.native = PagedKv(total_blocks=total, opaque=opaque, seed=7, caching=caching)
        self.model = PagedKvModel(total_blocks=total, opaque=opaque, seed=7, caching=caching)
        self.tables: dict[int, bytes] = {}

    @rule(hashes=HASHES, more=st.integers(0, 3))
    def admit(self, hashes: bytes, more: int) -> None:
        n_blocks = len(hashes) // 8
        n_matched = self.native.matched(hashes, n_blocks)
        assert n_matched == self.model.matched(hashes, n_blocks)
        table = self.native.hold(hashes, n_matched, n_blocks - n_matched + more)
        assert table == self.model.hold(hashes, n_matched, n_blocks - n_matched + more)
        if table is not None:
            self.tables[table] = hashes

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n_full=st.integers(0, 8), tail=HASHES)
    def commit(self, data: st.DataObject, n_full: int, tail: bytes) -> None:
        table = data.draw(st.sampled_from(sorted(self.tables)))
        hashes = self.tables[table] = self.tables[table] + tail
        done = outcome(lambda: self.native.commit(table, hashes, n_full))
        assert done == outcome(lambda: self.model.commit(table, hashes, n_full))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n_private=st.integers(0, 5))
    def grow(self, data: st.DataObject, n_private: int) -> None:
        table = data.draw(st.sampled_from(sorted(self.tables)))
        assert self.native.can_grow(n_private) == self.model.can_grow(n_private)
        grown = outcome(lambda: self.native.grow(table, n_private))
        assert grown == outcome(lambda: self.model.grow(table, n_private))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(sorted(self.tables)))
        del self.tables[table]
        self.native.release(table)
        self.model.release(table)

    @rule()
    def take_events(self) -> None:
        assert tuple(self.native.take_events()) == self.model.take_events()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "native"):
            native, model = self.native, self.model
            assert native.check_integrity(list(self.tables)) == []
            assert (native.free_blocks, native.idle_blocks, native.active_blocks, native.cached_blocks) == (
                model.free_blocks,
                model.idle_blocks,
                model.active_blocks,
                model.cached_blocks,
            )
            assert tuple(native.snapshot()) == model.snapshot()

    def teardown(self) -> None:
        if hasattr(self, "native"):
            assert tuple(self.native.take_events()) == self.model.take_events()


TestPagedKv = PagedKvMachine.TestCase


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=30), total=st.integers(4, 8))
def test_native_kv_memory_evicts_as_its_model_in_long_use(sizes: list[int], total: int) -> None:
    native = PagedKv(total_blocks=total, opaque=False, seed=0)
    model = PagedKvModel(total_blocks=total, opaque=False, seed=0)
    for number, size in enumerate(sizes * 3):
        hashes = pack_hashes([number % 3, *range(1, size)])
        for memory in (native, model):
            n_matched = memory.matched(hashes, size)
            table = memory.hold(hashes, n_matched, size - n_matched)
            assert table is not None
            memory.commit(table, hashes, size)
            memory.release(table)
        assert tuple(native.take_events()) == model.take_events()
