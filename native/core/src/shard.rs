//! One shard of a table: an open-addressing table of buckets over 1 to 16 pages.
//!
//! A bucket is a cache line: its keys, then their values of 4 bytes. Invariants: an entry lies in its home bucket or
//! after it, and every bucket between is full; a bucket is filled from its beginning; homes rise with keys, and depend
//! on no more of a key than its prefix; the last bucket is never full, so that a scan ends without a bound check.

mod filling;

use std::marker::PhantomData;

use crate::pages::{Page, PagePool, PAGE_BYTES};
use filling::Filling;

/// The key of a vacant slot.
pub(crate) const VACANT: u64 = u64::MAX;

/// The most pages of a shard; a full one splits.
const SHARD_PAGES: usize = 16;

const BUCKET_BYTES: usize = 64;
const PAGE_BUCKETS: usize = PAGE_BYTES / BUCKET_BYTES;

/// Entries of a bucket.
const SLOTS: usize = BUCKET_BYTES / (size_of::<u64>() + size_of::<u32>());

#[cfg(target_arch = "x86_64")]
const EACH_SLOT: u32 = (1 << (2 * SLOTS)) / 3;

/// The leading bits of a key that its place depends on, and by which it can be found alone.
pub(crate) const PREFIX_BITS: u32 = 31;

/// Buckets after the last home, for what does not fit there.
const SLACK_BUCKETS: usize = 6;

/// Beyond this load buckets overflow often.
const LOAD_MAX_PERCENT: usize = 88;

pub(crate) struct Shard<V: Copy> {
    pages: [Option<Page>; SHARD_PAGES],
    n_pages: u32,
    depth: u32,
    len: u32,
    values: PhantomData<V>,
}

// SAFETY: a shard owns its pages, and entries are plain values.
unsafe impl<V: Copy + Send> Send for Shard<V> {}
// SAFETY: as above; shared shards are only read.
unsafe impl<V: Copy + Sync> Sync for Shard<V> {}

/// A slot of a shard.
#[derive(Clone, Copy, Default)]
pub(crate) struct At {
    bucket: usize,
    index: usize,
}

/// Slots of one bucket: bit 2 n stands for slot n.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Slots(u32);

impl Slots {
    #[inline]
    fn first(self) -> Option<usize> {
        (self.0 != 0).then(|| self.0.trailing_zeros() as usize / 2)
    }

    #[inline]
    fn without_first(self) -> Self {
        Slots(self.0 & self.0.wrapping_sub(1))
    }
}

pub(crate) enum Found {
    At(At),
    /// The key is absent and would lie here; `is_clear`: no other key has its prefix.
    Vacant {
        at: At,
        is_clear: bool,
    },
}

/// The bits of a key that its place depends on.
#[inline]
pub(crate) fn prefix_of(key: u64) -> u64 {
    key >> (64 - PREFIX_BITS)
}

impl<V: Copy> Shard<V> {
    pub fn new(pages: &mut PagePool, depth: u32, n_pages: usize) -> Self {
        Filling::new(pages, depth, n_pages).finish()
    }

    /// A shard without pages, which holds nothing and may only be replaced.
    pub fn vacant() -> Self {
        const { assert!(size_of::<V>() == size_of::<u32>(), "a bucket has room for values of 4 bytes") };
        Shard { pages: [None; SHARD_PAGES], n_pages: 0, depth: 0, len: 0, values: PhantomData }
    }

    pub fn depth(&self) -> u32 {
        self.depth
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn n_buckets(&self) -> usize {
        self.n_pages as usize * PAGE_BUCKETS
    }

    #[inline]
    fn n_homes(&self) -> u64 {
        (self.n_buckets() - SLACK_BUCKETS) as u64
    }

    #[inline]
    fn home(&self, key: u64) -> usize {
        let spread = (prefix_of(key) << (32 - PREFIX_BITS) << self.depth) & u64::from(u32::MAX);
        ((spread * self.n_homes()) >> 32) as usize
    }

    /// The greatest key whose home is `bucket` or one before it, in the shard of `key`.
    #[inline]
    fn last_key(&self, bucket: usize, key: u64) -> u64 {
        let spread = ((((bucket as u64 + 1) << 32) - 1) / self.n_homes()).min(u32::MAX.into());
        let prefix = spread >> (32 - PREFIX_BITS) >> self.depth;
        let of_shard = key & !(u64::MAX >> self.depth);
        (of_shard | prefix << (64 - PREFIX_BITS) | u64::MAX >> PREFIX_BITS).min(VACANT - 1)
    }

    #[inline]
    fn bucket(&self, bucket: usize) -> *mut u8 {
        // SAFETY: callers name buckets below `n_buckets`, which lie in pages that exist.
        unsafe {
            let page = self.pages.get_unchecked(bucket / PAGE_BUCKETS).unwrap_unchecked();
            page.as_ptr().add(bucket % PAGE_BUCKETS * BUCKET_BYTES)
        }
    }

    #[inline]
    fn key_at(&self, at: At) -> *mut u64 {
        // SAFETY: the index is below SLOTS, so the key lies in the bucket.
        unsafe { self.bucket(at.bucket).cast::<u64>().add(at.index) }
    }

    #[inline]
    fn value_at(&self, at: At) -> *mut V {
        // SAFETY: the values follow the keys, as many.
        unsafe { self.bucket(at.bucket).cast::<u64>().add(SLOTS).cast::<V>().add(at.index) }
    }

    #[inline]
    fn key(&self, at: At) -> u64 {
        // SAFETY: every key of a finished shard is initialised.
        unsafe { *self.key_at(at) }
    }

    #[inline]
    pub fn value(&self, at: At) -> V {
        // SAFETY: as above.
        unsafe { *self.value_at(at) }
    }

    #[inline]
    pub fn set_value(&mut self, at: At, value: V) {
        // SAFETY: the slot is ours.
        unsafe { *self.value_at(at) = value }
    }

    #[inline]
    fn write(&mut self, at: At, key: u64, value: V) {
        // SAFETY: the slot is ours.
        unsafe {
            *self.key_at(at) = key;
            *self.value_at(at) = value;
        }
    }

    #[inline]
    fn is_full(&self, bucket: usize) -> bool {
        self.key(At { bucket, index: SLOTS - 1 }) != VACANT
    }

    #[inline]
    fn n_in_bucket(&self, bucket: usize) -> usize {
        self.slots_with(bucket, VACANT).first().unwrap_or(SLOTS)
    }

    /// The slots of a bucket that have this key.
    #[inline]
    fn slots_with(&self, bucket: usize, key: u64) -> Slots {
        self.slots_with_leading::<0>(bucket, key)
    }

    /// The slots of a bucket whose key has the prefix of `key`.
    #[inline]
    fn slots_with_prefix(&self, bucket: usize, key: u64) -> Slots {
        self.slots_with_leading::<{ 64 - PREFIX_BITS as i32 }>(bucket, prefix_of(key))
    }

    /// The slots of a bucket whose key is `wanted` without its last `SHIFT` bits.
    #[inline]
    fn slots_with_leading<const SHIFT: i32>(&self, bucket: usize, wanted: u64) -> Slots {
        #[cfg(target_arch = "x86_64")]
        {
            self.slots_with_sse2::<SHIFT>(bucket, wanted)
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self.slots_with_one_by_one::<SHIFT>(bucket, wanted)
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn slots_with_sse2<const SHIFT: i32>(&self, bucket: usize, wanted: u64) -> Slots {
        use std::arch::x86_64::{
            _mm_cmpeq_epi32, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32,
            _mm_set1_epi64x, _mm_srli_epi64,
        };
        const { assert!(SLOTS <= 8, "four vectors of two keys") };
        let keys = self.bucket(bucket).cast::<u64>();
        // SAFETY: every x86-64 has SSE2; a bucket is a cache line.
        let equal_halves = unsafe {
            let wanted = _mm_set1_epi64x(wanted as i64);
            let halves = |two: usize| {
                let leading = _mm_srli_epi64::<SHIFT>(_mm_load_si128(keys.add(2 * two).cast()));
                _mm_cmpeq_epi32(leading, wanted)
            };
            let (lower, upper) =
                (_mm_packs_epi32(halves(0), halves(1)), _mm_packs_epi32(halves(2), halves(3)));
            _mm_movemask_epi8(_mm_packs_epi16(lower, upper)) as u32
        };
        Slots(equal_halves & (equal_halves >> 1) & EACH_SLOT)
    }

    #[cfg(any(test, not(target_arch = "x86_64")))]
    fn slots_with_one_by_one<const SHIFT: i32>(&self, bucket: usize, wanted: u64) -> Slots {
        let bit = |index| u32::from(self.key(At { bucket, index }) >> SHIFT == wanted) << (2 * index);
        Slots((0..SLOTS).map(bit).sum())
    }

    /// The bucket where a scan for `key` begins, which is on its way from memory with the one after it.
    #[inline]
    pub fn prefetch(&self, key: u64) -> usize {
        let home = self.home(key);
        #[cfg(target_arch = "x86_64")]
        for i in 0..2 {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
            let line = self.bucket(home).wrapping_add(i * BUCKET_BYTES);
            // SAFETY: a prefetch has no effect on memory, and any address will do.
            unsafe { _mm_prefetch(line.cast::<i8>(), _MM_HINT_T0) };
        }
        home
    }

    #[inline]
    pub fn find(&self, key: u64) -> Found {
        let (mut bucket, mut is_clear) = (self.home(key), true);
        loop {
            let mut slots = self.slots_with_prefix(bucket, key);
            while let Some(index) = slots.first() {
                let at = At { bucket, index };
                match self.key(at) {
                    found if found == key => return Found::At(at),
                    VACANT => {}
                    _ => is_clear = false,
                }
                slots = slots.without_first();
            }
            if !self.is_full(bucket) {
                return Found::Vacant { at: At { bucket, index: self.n_in_bucket(bucket) }, is_clear };
            }
            bucket += 1;
        }
    }

    #[inline]
    fn find_in(&self, bucket: usize, key: u64) -> Option<At> {
        // Without a branch for each slot: which one it is cannot be predicted.
        self.slots_with(bucket, key).first().map(|index| At { bucket, index })
    }

    /// The first entry whose key has the prefix of `key` and is wanted.
    #[inline]
    pub fn find_with_prefix(&self, key: u64, is_wanted: impl Fn(u64) -> bool) -> Option<(At, u64)> {
        let mut bucket = self.home(key);
        loop {
            let mut slots = self.slots_with_prefix(bucket, key);
            while let Some(index) = slots.first() {
                let at = At { bucket, index };
                if self.key(at) != VACANT && is_wanted(self.key(at)) {
                    return Some((at, self.key(at)));
                }
                slots = slots.without_first();
            }
            if !self.is_full(bucket) {
                return None;
            }
            bucket += 1;
        }
    }

    #[inline]
    pub fn get(&self, key: u64) -> Option<V> {
        self.get_from(self.home(key), key)
    }

    #[inline]
    pub fn get_from(&self, mut bucket: usize, key: u64) -> Option<V> {
        loop {
            if let Some(at) = self.find_in(bucket, key) {
                return Some(self.value(at));
            }
            if !self.is_full(bucket) {
                return None;
            }
            bucket += 1;
        }
    }

    /// Puts an absent key where `find` said. False when the shard has to grow first.
    #[inline]
    pub fn insert_at(&mut self, at: At, key: u64, value: V) -> bool {
        let len_max = self.n_buckets() * SLOTS * LOAD_MAX_PERCENT / 100;
        if self.len as usize >= len_max || at.bucket + 1 >= self.n_buckets() {
            return false;
        }
        self.write(at, key, value);
        self.len += 1;
        true
    }

    /// Takes a slot out of its bucket; true when that leaves a gap in a run of full buckets.
    #[inline]
    fn take_out(&mut self, at: At) -> bool {
        let was_full = self.is_full(at.bucket);
        let last = At { index: self.n_in_bucket(at.bucket) - 1, ..at };
        let (key, value) = (self.key(last), self.value(last));
        self.write(at, key, value);
        // SAFETY: the slot is ours.
        unsafe { *self.key_at(last) = VACANT };
        was_full
    }

    pub fn remove_at(&mut self, at: At) {
        self.len -= 1;
        let key = self.key(at);
        if !self.take_out(at) {
            return;
        }
        // What lies beyond a full bucket may belong before the gap, and would not be found behind it.
        let (mut gap, mut bucket) = (at.bucket, at.bucket + 1);
        let mut last_key = self.last_key(gap, key);
        loop {
            let displaced = (0..SLOTS).map(|index| At { bucket, index }).find(|&at| self.key(at) <= last_key);
            let goes_on = match displaced {
                None => self.is_full(bucket),
                Some(at) => {
                    let (key, value) = (self.key(at), self.value(at));
                    self.write(At { bucket: gap, index: SLOTS - 1 }, key, value);
                    gap = bucket;
                    last_key = self.last_key(gap, key);
                    self.take_out(at)
                }
            };
            if !goes_on {
                return;
            }
            bucket += 1;
        }
    }

    pub fn for_each(&self, mut f: impl FnMut(u64, V)) {
        for bucket in 0..self.n_buckets() {
            for index in 0..SLOTS {
                let at = At { bucket, index };
                if self.key(at) == VACANT {
                    break;
                }
                f(self.key(at), self.value(at));
            }
        }
    }

    /// Grows by an eighth. False when the shard has all the pages that it may have.
    pub fn grow(&mut self, pages: &mut PagePool) -> bool {
        let n_pages = self.n_pages as usize;
        (n_pages + (n_pages / 8).max(1)..=SHARD_PAGES).any(|n| self.rebuild(pages, n))
    }

    /// Whether more pages would help to place a key: among few entries, it is their keys that are too near.
    pub fn is_loaded(&self) -> bool {
        self.len as usize * 2 > self.n_buckets() * SLOTS
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

    /// The pages that hold `len` entries at a comfortable load: two halves of a full shard take nine each.
    fn pages_for(len: usize) -> usize {
        (len * 5 / 4).div_ceil(PAGE_BUCKETS * SLOTS).max(1)
    }

    /// Whether this shard and its buddy together are small enough to be one that is half full at most.
    pub fn fits_with(&self, buddy: &Self) -> bool {
        Self::pages_for((self.len + buddy.len) as usize) <= SHARD_PAGES / 2
    }

    /// Rebuilds the shard over `n_pages`. False, changing nothing, when they crowd at the end.
    fn rebuild(&mut self, pages: &mut PagePool, n_pages: usize) -> bool {
        let mut target = Filling::new(pages, self.depth, n_pages);
        let mut fits = true;
        self.for_each(|key, value| fits = fits && target.place(key, value));
        let target = target.finish();
        let spare = if fits { std::mem::replace(self, target) } else { target };
        spare.release(pages);
        fits
    }

    /// Keeps the keys whose next bit is 0 and returns the others. None, changing nothing, when they crowd at the end.
    pub fn split(&mut self, pages: &mut PagePool) -> Option<Self> {
        let next_bit = 1u64 << (63 - self.depth);
        let (mut below, mut above) = (Vec::new(), Vec::new());
        self.for_each(|key, value| {
            let half = if key & next_bit == 0 { &mut below } else { &mut above };
            half.push((key, value));
        });
        let below = Self::laid_out(pages, self.depth + 1, &below)?;
        let Some(above) = Self::laid_out(pages, self.depth + 1, &above) else {
            below.release(pages);
            return None;
        };
        std::mem::replace(self, below).release(pages);
        Some(above)
    }

    /// Takes over the entries of its buddy and leaves it vacant. False, changing nothing, when they crowd at the
    /// end; then both may stay as they are.
    pub fn absorb(&mut self, pages: &mut PagePool, buddy: &mut Self) -> bool {
        let mut entries = Vec::with_capacity((self.len + buddy.len) as usize);
        self.for_each(|key, value| entries.push((key, value)));
        buddy.for_each(|key, value| entries.push((key, value)));
        let Some(merged) = Self::laid_out(pages, self.depth - 1, &entries) else { return false };
        std::mem::replace(buddy, Self::vacant()).release(pages);
        std::mem::replace(self, merged).release(pages);
        true
    }

    /// A shard of these entries; None when they crowd at the end.
    fn laid_out(pages: &mut PagePool, depth: u32, entries: &[(u64, V)]) -> Option<Self> {
        for n_pages in Self::pages_for(entries.len()).min(SHARD_PAGES)..=SHARD_PAGES {
            let mut filling = Filling::new(pages, depth, n_pages);
            let fits = entries.iter().all(|&(key, value)| filling.place(key, value));
            let shard = filling.finish();
            if fits {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn finds_slots<V: Copy>(value: V) {
        let mut pages = PagePool::default();
        for n_keys in 0..=SLOTS {
            let mut shard = Shard::new(&mut pages, 0, 1);
            // halves that are equal, of other keys: neither may count
            let keys: Vec<u64> = (0..n_keys as u64).map(|n| ((n / 2) << 32) | (n % 2)).collect();
            for (index, &key) in keys.iter().enumerate() {
                shard.write(At { bucket: 0, index }, key, value);
            }
            for key in keys.iter().copied().chain([VACANT, 7, 7 << 32, u64::from(u32::MAX), VACANT << 32]) {
                let found = shard.slots_with(0, key);
                assert_eq!(found, shard.slots_with_one_by_one::<0>(0, key));
                let expected =
                    if key == VACANT { n_keys } else { (0..n_keys).find(|&i| keys[i] == key).unwrap_or(9) };
                assert_eq!(found.first().unwrap_or(9), if expected == SLOTS { 9 } else { expected });
            }
            shard.release(&mut pages);
        }
    }

    #[test]
    fn no_key_after_the_last_of_a_bucket_has_its_home_there() {
        let mut pages = PagePool::default();
        for (depth, first) in [(0, 0), (1, 1 << 63), (5, 21 << 59), (26, u64::MAX << 38)] {
            for n_pages in [1, 7, SHARD_PAGES] {
                let shard = Shard::<u32>::new(&mut pages, depth, n_pages);
                let end = (first | u64::MAX >> depth).min(VACANT - 1);
                for bucket in 0..shard.n_buckets() {
                    let last = shard.last_key(bucket, first);
                    assert!((first..=end).contains(&last) && shard.home(last) <= bucket);
                    assert!(last == end || shard.home(last + 1) > bucket);
                }
                shard.release(&mut pages);
            }
        }
    }

    #[test]
    fn slots_are_found_by_whole_keys_and_not_among_values() {
        finds_slots(0u32);
        finds_slots(u32::MAX);
    }
}
