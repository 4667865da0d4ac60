//! Laying a shard out: when it grows, shrinks, splits or is joined with its buddy.

use super::{At, Shard, PAGE_BUCKETS, SHARD_PAGES, SLOTS, VACANT};
use crate::pages::PagePool;

/// A shard that is being rebuilt. It counts the entries of each bucket, so that it need not scan; until it is finished
/// its vacant slots are not marked.
pub(super) struct Filling<V: Copy> {
    shard: Shard<V>,
    n_in_buckets: [u8; SHARD_PAGES * PAGE_BUCKETS],
}

impl<V: Copy> Filling<V> {
    pub fn new(pages: &mut PagePool, depth: u32, n_pages: usize) -> Self {
        let mut shard = Shard { depth, n_pages: n_pages as u32, ..Shard::vacant() };
        shard.pages[..n_pages].fill_with(|| Some(pages.take()));
        Filling { shard, n_in_buckets: [0; SHARD_PAGES * PAGE_BUCKETS] }
    }

    /// Puts in a key that is known to be absent. False when it would lie in the last bucket.
    #[inline]
    pub fn place(&mut self, key: u64, value: V) -> bool {
        let mut bucket = self.shard.home(key);
        while usize::from(self.n_in_buckets[bucket]) == SLOTS {
            bucket += 1;
        }
        let fits = bucket + 1 < self.shard.n_buckets();
        if fits {
            self.shard.write(At { bucket, index: self.n_in_buckets[bucket].into() }, key, value);
            self.n_in_buckets[bucket] += 1;
            self.shard.len += 1;
        }
        fits
    }

    pub fn finish(self) -> Shard<V> {
        for bucket in 0..self.shard.n_buckets() {
            for index in self.n_in_buckets[bucket].into()..SLOTS {
                // SAFETY: the slot is the shard's own.
                unsafe { *self.shard.key_at(At { bucket, index }) = VACANT };
            }
        }
        self.shard
    }
}
