//! One shard of a table: a sorted open-addressing table over 1 to 16 pages.
//!
//! Invariants: keys rise with positions; every entry lies at or after its home; there is no vacant slot
//! between an entry and its home; the last slot is always vacant, so a scan ends without a bound check.

use crate::pages::{Page, PagePool, PAGE_BYTES};

/// The key of a vacant slot: above every other, so that a scan for a smaller key stops at it.
pub(crate) const VACANT: u64 = u64::MAX;

/// The most pages of a shard; a full one splits.
const SHARD_PAGES: usize = 16;

/// Positions after the last home, for the entries that collide there.
const SLACK: usize = 48;

/// Keys that are compared at once.
const WINDOW: usize = 8;

/// Beyond this the runs that an insertion moves grow long.
const LOAD_MAX_PERCENT: usize = 85;

#[repr(C, packed(4))]
#[derive(Clone, Copy)]
struct Entry<V: Copy> {
    key: u64,
    value: V,
}

pub(crate) struct Shard<V: Copy> {
    pages: [Option<Page>; SHARD_PAGES],
    n_pages: u32,
    depth: u32,
    len: u32,
    values: std::marker::PhantomData<V>,
}

// SAFETY: a shard owns its pages, and entries are plain values.
unsafe impl<V: Copy + Send> Send for Shard<V> {}
// SAFETY: as above; shared shards are only read.
unsafe impl<V: Copy + Sync> Sync for Shard<V> {}

/// A slot of a shard; slots are ordered by page and then by index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct At {
    page: usize,
    index: usize,
}

pub(crate) enum Found {
    At(At),
    /// The key is absent; it would lie here.
    Vacant(At),
}

impl<V: Copy> Shard<V> {
    const PER_PAGE: usize = PAGE_BYTES / size_of::<Entry<V>>();

    pub fn new(pages: &mut PagePool, depth: u32) -> Self {
        let mut shard = Shard { depth, ..Self::vacant() };
        shard.extend_to(pages, 1);
        shard
    }

    /// A shard without pages, which holds nothing and may only be replaced.
    pub fn vacant() -> Self {
        Shard { pages: [None; SHARD_PAGES], n_pages: 0, depth: 0, len: 0, values: std::marker::PhantomData }
    }

    pub fn depth(&self) -> u32 {
        self.depth
    }

    fn extend_to(&mut self, pages: &mut PagePool, n_pages: usize) {
        for slot in &mut self.pages[self.n_pages as usize..n_pages] {
            let page = pages.take();
            // SAFETY: the page is ours; all ones is the vacant key.
            unsafe { page.as_ptr().write_bytes(0xff, PAGE_BYTES) };
            *slot = Some(page);
        }
        self.n_pages = n_pages as u32;
    }

    #[inline]
    fn capacity(&self) -> usize {
        self.n_pages as usize * Self::PER_PAGE
    }

    #[inline]
    fn home(&self, key: u64) -> At {
        let spread = (key << self.depth) >> 32;
        let position = ((spread * (self.capacity() - SLACK) as u64) >> 32) as usize;
        At { page: position / Self::PER_PAGE, index: position % Self::PER_PAGE }
    }

    /// The entries of a page from `at` on; callers stay inside the page.
    #[inline]
    fn entry(&self, at: At) -> *mut Entry<V> {
        // SAFETY: a slot names a page that the shard has, and an index inside it.
        unsafe {
            let page = self.pages.get_unchecked(at.page).unwrap_unchecked();
            page.as_ptr().cast::<Entry<V>>().add(at.index)
        }
    }

    #[inline]
    pub fn value(&self, at: At) -> V {
        // SAFETY: every slot of a page is initialised.
        unsafe { (*self.entry(at)).value }
    }

    #[inline]
    pub fn set_value(&mut self, at: At, value: V) {
        // SAFETY: the slot is ours.
        unsafe { (*self.entry(at)).value = value }
    }

    /// Where a scan for `key` begins, on its way from memory.
    #[inline]
    pub fn prefetch(&self, key: u64) -> At {
        let home = self.home(key);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no effect on memory; any address is allowed.
        unsafe {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
            let entry = self.entry(home).cast::<i8>();
            _mm_prefetch(entry, _MM_HINT_T0);
            _mm_prefetch(entry.wrapping_add(64), _MM_HINT_T0);
        }
        home
    }

    #[inline]
    pub fn find(&self, key: u64) -> Found {
        self.find_from(self.home(key), key)
    }

    /// Looks for `key` from its home on. Windows are counted without a branch: how far an entry lies from its
    /// home cannot be predicted.
    #[inline]
    pub fn find_from(&self, mut at: At, key: u64) -> Found {
        loop {
            let window = WINDOW.min(Self::PER_PAGE - at.index);
            let entries = self.entry(at);
            let smaller = if window == WINDOW {
                // SAFETY: the window lies in one page.
                (0..WINDOW).map(|i| usize::from(unsafe { (*entries.add(i)).key } < key)).sum()
            } else {
                // SAFETY: as above.
                (0..window).map(|i| usize::from(unsafe { (*entries.add(i)).key } < key)).sum()
            };
            at.index += smaller;
            if smaller < window {
                // SAFETY: the slot lies in the window.
                let here = unsafe { (*entries.add(smaller)).key };
                return if here == key { Found::At(at) } else { Found::Vacant(at) };
            }
            if at.index == Self::PER_PAGE {
                // The last slot of a shard is vacant, so there is another page.
                at = At { page: at.page + 1, index: 0 };
            }
        }
    }

    #[inline]
    pub fn get(&self, key: u64) -> Option<V> {
        self.get_from(self.home(key), key)
    }

    #[inline]
    pub fn get_from(&self, home: At, key: u64) -> Option<V> {
        match self.find_from(home, key) {
            Found::At(at) => Some(self.value(at)),
            Found::Vacant(_) => None,
        }
    }

    /// Puts an absent key where `find` said. False when the shard has to grow first.
    #[inline]
    pub fn insert_at(&mut self, at: At, key: u64, value: V) -> bool {
        if self.len as usize >= self.len_max() {
            return false;
        }
        let end = self.end_of_run(at, |_, _| false);
        if end.page + 1 == self.n_pages as usize && end.index + 1 == Self::PER_PAGE {
            return false;
        }
        self.shift_right(at, end);
        // SAFETY: the slot is ours.
        unsafe { *self.entry(at) = Entry { key, value } };
        self.len += 1;
        true
    }

    /// The first slot from `at` on that is vacant, or whose key and place `stop` accepts.
    #[inline]
    fn end_of_run(&self, mut at: At, stop: impl Fn(u64, At) -> bool) -> At {
        loop {
            let page = self.entry(At { index: 0, ..at });
            while at.index < Self::PER_PAGE {
                // SAFETY: the index lies in the page.
                let key = unsafe { (*page.add(at.index)).key };
                if key == VACANT || stop(key, at) {
                    return at;
                }
                at.index += 1;
            }
            at = At { page: at.page + 1, index: 0 };
        }
    }

    /// The load at which a shard grows.
    #[inline]
    fn len_max(&self) -> usize {
        self.capacity() * LOAD_MAX_PERCENT / 100
    }

    /// Moves the entries from `begin` up to `end` one slot up, over the vacant slot `end`.
    #[inline]
    fn shift_right(&mut self, begin: At, mut end: At) {
        while end.page > begin.page {
            let first = At { index: 0, ..end };
            let before = At { page: end.page - 1, index: Self::PER_PAGE - 1 };
            // SAFETY: the slots are ours, and those from `first` to `end` lie in one page.
            unsafe {
                std::ptr::copy(self.entry(first), self.entry(first).add(1), end.index);
                *self.entry(first) = *self.entry(before);
            }
            end = before;
        }
        // SAFETY: the slots from `begin` to `end` lie in one page.
        unsafe { std::ptr::copy(self.entry(begin), self.entry(begin).add(1), end.index - begin.index) };
    }

    pub fn remove_at(&mut self, mut at: At) {
        // Those that follow move down until one is at home or a slot is vacant.
        let after = if at.index + 1 < Self::PER_PAGE {
            At { index: at.index + 1, ..at }
        } else {
            At { page: at.page + 1, index: 0 }
        };
        let end = self.end_of_run(after, |key, here| self.home(key) == here);
        while at.page < end.page {
            let last = At { index: Self::PER_PAGE - 1, ..at };
            let next = At { page: at.page + 1, index: 0 };
            // SAFETY: the slots are ours, and those from `at` to `last` lie in one page.
            unsafe {
                std::ptr::copy(self.entry(at).add(1), self.entry(at), last.index - at.index);
                if end == next {
                    at = last;
                    break;
                }
                *self.entry(last) = *self.entry(next);
            }
            at = next;
        }
        if at.page == end.page {
            // SAFETY: the slots from `at` to `end` lie in one page.
            unsafe { std::ptr::copy(self.entry(at).add(1), self.entry(at), end.index - at.index - 1) };
            at.index = end.index - 1;
        }
        // SAFETY: the slot is ours.
        unsafe { (*self.entry(at)).key = VACANT };
        self.len -= 1;
    }

    pub fn for_each(&self, mut f: impl FnMut(u64, V)) {
        for page in self.pages.iter().flatten() {
            for index in 0..Self::PER_PAGE {
                // SAFETY: every slot of a page is initialised.
                let Entry { key, value } = unsafe { *page.as_ptr().cast::<Entry<V>>().add(index) };
                if key != VACANT {
                    f(key, value);
                }
            }
        }
    }

    /// Grows by one page. False when the shard has all the pages that it may have.
    pub fn grow(&mut self, pages: &mut PagePool) -> bool {
        let n_pages = self.n_pages as usize;
        (n_pages + 1..=SHARD_PAGES).any(|n| self.rebuild(pages, n))
    }

    /// Whether to try to free pages now: it may be refused, so not at every removal.
    #[inline]
    pub fn is_sparse(&self) -> bool {
        let n_pages = self.n_pages as usize;
        self.len % 16 == 0 && (n_pages == 1 || Self::pages_for(self.len as usize) * 4 <= n_pages * 3)
    }

    pub fn shrink(&mut self, pages: &mut PagePool) {
        let n_pages = Self::pages_for(self.len as usize);
        if n_pages * 4 <= self.n_pages as usize * 3 {
            self.rebuild(pages, n_pages);
        }
    }

    /// The pages that hold `len` entries at five sixths of their capacity: two halves of a full shard take
    /// nine.
    fn pages_for(len: usize) -> usize {
        (len * 6 / 5).div_ceil(Self::PER_PAGE).max(1)
    }

    /// Whether this shard and its buddy together are small enough to be one that is half full at most.
    pub fn fits_with(&self, buddy: &Self) -> bool {
        Self::pages_for((self.len + buddy.len) as usize) <= SHARD_PAGES / 2
    }

    /// Lays the entries out anew over `n_pages`. False, changing nothing, when they collide beyond the end.
    fn rebuild(&mut self, pages: &mut PagePool, n_pages: usize) -> bool {
        let mut target = Shard { depth: self.depth, ..Self::vacant() };
        target.extend_to(pages, n_pages);
        let mut fits = true;
        let mut next = At { page: 0, index: 0 };
        self.for_each(|key, value| fits = fits && target.append(&mut next, key, value));
        let spare = if fits { std::mem::replace(self, target) } else { target };
        spare.release(pages);
        fits
    }

    /// Puts a key above all others into a shard that is being laid out; `next` is the first slot after them.
    fn append(&mut self, next: &mut At, key: u64, value: V) -> bool {
        let at = self.home(key).max(*next);
        *next = At { index: at.index + 1, ..at };
        if next.index == Self::PER_PAGE {
            *next = At { page: at.page + 1, index: 0 };
        }
        if next.page == self.n_pages as usize {
            return false;
        }
        // SAFETY: the slot is ours.
        unsafe { *self.entry(at) = Entry { key, value } };
        self.len += 1;
        true
    }

    /// Keeps the keys whose next bit is 0 and returns the others.
    pub fn split(&mut self, pages: &mut PagePool) -> Self {
        let next_bit = 1u64 << (63 - self.depth);
        let mut entries = Vec::with_capacity(self.len as usize);
        self.for_each(|key, value| entries.push((key, value)));
        let middle = entries.partition_point(|(key, _)| key & next_bit == 0);
        let half = |pages: &mut PagePool, entries| {
            // What lay within half the homes of 16 pages has room for twice as many homes.
            Self::laid_out(pages, self.depth + 1, entries).expect("half a shard fits in a whole one")
        };
        let (lower, upper) = (half(pages, &entries[..middle]), half(pages, &entries[middle..]));
        std::mem::replace(self, lower).release(pages);
        upper
    }

    /// Takes over the entries of its buddy, whose keys are all above, and leaves it vacant. False, changing
    /// nothing, when the keys crowd at the end; then both may stay as they are.
    pub fn absorb(&mut self, pages: &mut PagePool, upper: &mut Self) -> bool {
        let mut entries = Vec::with_capacity((self.len + upper.len) as usize);
        self.for_each(|key, value| entries.push((key, value)));
        upper.for_each(|key, value| entries.push((key, value)));
        let Some(merged) = Self::laid_out(pages, self.depth - 1, &entries) else { return false };
        std::mem::replace(upper, Self::vacant()).release(pages);
        std::mem::replace(self, merged).release(pages);
        true
    }

    /// A shard of sorted entries; None when they crowd at the end.
    fn laid_out(pages: &mut PagePool, depth: u32, entries: &[(u64, V)]) -> Option<Self> {
        for n_pages in Self::pages_for(entries.len()).min(SHARD_PAGES)..=SHARD_PAGES {
            let mut shard = Shard { depth, ..Self::vacant() };
            shard.extend_to(pages, n_pages);
            let mut next = At { page: 0, index: 0 };
            if entries.iter().all(|&(key, value)| shard.append(&mut next, key, value)) {
                return Some(shard);
            }
            shard.release(pages);
        }
        None
    }

    pub fn release(self, pages: &mut PagePool) {
        for page in self.pages.into_iter().flatten() {
            pages.give_back(page);
        }
    }
}
