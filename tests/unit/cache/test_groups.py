from dovetail.cache.groups import KVGroup, PagedGroup


def test_a_paged_group_keeps_everything():
    group: KVGroup = PagedGroup("full", 16)
    assert [group.pages_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert group.reusable_len(48) == 48
    assert group.first_live_page(100_000) == 0
