"""What every store of cordons keeps."""

from collections.abc import Callable

from msgspec import structs

from kvrouter.core.cordon_rules import Cordon, CordonRules, CordonSource
from kvrouter.transports.records.port import CordonStore

ZONE = Cordon("zone", "a", at_s=1_700_000_000.5, by="ann@desk", reason="maintenance of rack 4")


class CordonLaws:
    """The laws of :class:`~kvrouter.transports.records.port.CordonStore`. The fixture ``end`` makes ends of
    one store, each as another process has it.
    """

    async def test_an_empty_store_lists_no_cordons(self, end: Callable[[], CordonStore]) -> None:
        assert await end().read() == ()
        await end().remove(ZONE)
        assert await end().read() == ()

    async def test_one_client_reads_the_cordons_of_another(self, end: Callable[[], CordonStore]) -> None:
        one, other = end(), end()
        assert await other.read() == ()
        await one.put(ZONE)
        assert await other.read() == (ZONE,)
        assert await end().read() == (ZONE,), "and so does one that comes later"

    async def test_a_source_has_one_cordon_for_each_place(self, end: Callable[[], CordonStore]) -> None:
        one, other = end(), end()
        await one.put(ZONE)
        changed = structs.replace(ZONE, reason="fans", by="bob")
        await other.put(changed)
        assert await one.read() == (changed,)
        annotated = structs.replace(ZONE, source=CordonSource.NODE_ANNOTATION, reason="")
        await one.put(annotated)
        assert CordonRules(await other.read()) == CordonRules((changed, annotated))
        await other.remove(ZONE)
        assert await one.read() == (annotated,)

    async def test_a_removed_cordon_is_gone_for_all_and_can_be_set_again(
        self, end: Callable[[], CordonStore]
    ) -> None:
        one, other = end(), end()
        rest = Cordon("worker", "7", at_s=1.0)
        await one.put(ZONE)
        await one.put(rest)
        await other.remove(ZONE)
        await other.remove(ZONE)
        assert await one.read() == (rest,)
        await one.put(ZONE)
        assert CordonRules(await other.read()) == CordonRules((ZONE, rest))

    async def test_names_of_places_may_hold_any_printable_character(
        self, end: Callable[[], CordonStore]
    ) -> None:
        odd = [Cordon("rack", name, at_s=1.0) for name in ("a/b", "..", "a b", "ä>*", "x" * 256, "a.b")]
        odd.append(Cordon("topology.kubernetes.io/zone", "eu-1", at_s=1.0, reason="x" * 1024))
        for each in odd:
            await end().put(each)
        assert CordonRules(await end().read()) == CordonRules(odd)
        for each in odd:
            await end().remove(each)
        assert await end().read() == ()
