//! A map from well-mixed 64-bit keys to small values: dense, prefetchable, and growing a few pages at a time.
//!
//! The leading bits of a key choose a shard through a directory; a shard is an open-addressing table over 1 to 16 pages
//! whose buckets begin on cache lines, so that most lookups touch one line and the directory. A full shard grows by an
//! eighth, or splits in two at 16 pages, so no step moves more than 16 pages, and 78 to 88 % of a large
//! table's slots are in use. It shrinks the same way.

use hashbrown::HashMap;

use crate::pages::PagePool;
use crate::shard::{self, Shard, PREFIX_BITS, VACANT};

/// The directory has at most 2^26 entries; mixed keys fill the memory of any machine before that.
const DEPTH_MAX: u32 = 26;

/// Stands for no shard.
const OUTSIDE: u32 = u32::MAX;

/// A map from keys to `V`. Every page it uses belongs to the pool that is passed in, always the same one.
pub struct Table<V: Copy> {
    shards: Vec<Shard<V>>,
    free_shards: Vec<u32>,
    /// For each value of the `depth` leading bits, the shard that holds those keys. Empty when the table is.
    directory: Vec<u32>,
    depth: u32,
    len: usize,
    /// Keys that have no slot: the one that marks vacant slots, and those for which there was no room.
    outside: HashMap<u64, V>,
}

/// Where a key is, or would be, until the table is changed there.
#[derive(Clone, Copy)]
pub struct Place {
    /// `OUTSIDE` for a key without a slot, and in a table without shards.
    shard: u32,
    at: shard::At,
}

pub enum Found {
    At(Place),
    /// `is_clear`: no other key that has a slot has the same leading bits.
    Vacant {
        place: Place,
        is_clear: bool,
    },
}

/// Where a key would be, as far as it is known before its memory has arrived.
#[derive(Clone, Copy)]
pub struct Probe<'a, V: Copy>(Option<(&'a Shard<V>, usize)>);

impl<V: Copy> Default for Table<V> {
    fn default() -> Self {
        Table {
            shards: Vec::new(),
            free_shards: Vec::new(),
            directory: Vec::new(),
            depth: 0,
            len: 0,
            outside: HashMap::new(),
        }
    }
}

impl<V: Copy> Table<V> {
    /// The number of keys.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes outside the pages.
    pub fn own_bytes(&self) -> usize {
        self.shards.capacity() * size_of::<Shard<V>>()
            + (self.directory.capacity() + self.free_shards.capacity()) * size_of::<u32>()
            + self.outside.capacity() * (size_of::<(u64, V)>() + 1)
    }

    #[inline]
    fn shard_of(&self, key: u64) -> Option<&Shard<V>> {
        Some(self.shard(*self.directory.get(prefix(key, self.depth))?))
    }

    /// Asks the processor to fetch where `key` is.
    #[inline]
    pub fn prefetch(&self, key: u64) -> Probe<'_, V> {
        Probe(self.shard_of(key).map(|shard| (shard, shard.prefetch(key))))
    }

    /// The value of the `key` that was prefetched.
    #[inline]
    pub fn get_prefetched(&self, probe: Probe<'_, V>, key: u64) -> Option<V> {
        match probe.0 {
            Some((shard, home)) if key != VACANT => shard.get_from(home, key),
            _ => None,
        }
        .or_else(|| self.get_outside(key))
    }

    #[inline]
    pub fn get(&self, key: u64) -> Option<V> {
        match self.shard_of(key) {
            Some(shard) if key != VACANT => shard.get(key),
            _ => None,
        }
        .or_else(|| self.get_outside(key))
    }

    #[inline]
    fn get_outside(&self, key: u64) -> Option<V> {
        if self.outside.is_empty() {
            return None;
        }
        self.outside.get(&key).copied()
    }

    #[inline]
    pub fn find(&self, key: u64) -> Found {
        let outside = Place { shard: OUTSIDE, at: shard::At::default() };
        let mut vacant = Found::Vacant { place: outside, is_clear: true };
        if let (Some(&shard), true) = (self.directory.get(prefix(key, self.depth)), key != VACANT) {
            match self.shard(shard).find(key) {
                shard::Found::At(at) => return Found::At(Place { shard, at }),
                shard::Found::Vacant { at, is_clear } => {
                    vacant = Found::Vacant { place: Place { shard, at }, is_clear };
                }
            }
        }
        match self.get_outside(key) {
            Some(_) => Found::At(outside),
            None => vacant,
        }
    }

    /// The first key that has these leading bits and is wanted, and its place. Those without a slot are left out.
    #[inline]
    pub fn find_with_prefix(&self, leading: u32, is_wanted: impl Fn(u64) -> bool) -> Option<(Place, u64)> {
        let key = u64::from(leading) << (64 - PREFIX_BITS);
        let shard = *self.directory.get(prefix(key, self.depth))?;
        let (at, key) = self.shard(shard).find_with_prefix(key, is_wanted)?;
        Some((Place { shard, at }, key))
    }

    #[inline]
    fn shard(&self, index: u32) -> &Shard<V> {
        // SAFETY: the directory only names shards that exist.
        unsafe { self.shards.get_unchecked(index as usize) }
    }

    /// The value of a key that was found.
    #[inline]
    pub fn value(&self, place: Place, key: u64) -> V {
        match place.shard {
            OUTSIDE => self.outside[&key],
            shard => self.shards[shard as usize].value(place.at),
        }
    }

    #[inline]
    pub fn set_value(&mut self, place: Place, key: u64, value: V) {
        match place.shard {
            OUTSIDE => drop(self.outside.insert(key, value)),
            shard => self.shards[shard as usize].set_value(place.at, value),
        }
    }

    /// Puts in a key that was not found. False when it has no slot, so that its prefix does not find it.
    #[inline]
    pub fn insert(&mut self, pages: &mut PagePool, place: Place, key: u64, value: V) -> bool {
        self.len += 1;
        if place.shard != OUTSIDE && self.shards[place.shard as usize].insert_at(place.at, key, value) {
            return true;
        }
        self.insert_growing(pages, key, value)
    }

    /// Removes a key that was found.
    #[inline]
    pub fn remove_at(&mut self, pages: &mut PagePool, place: Place, key: u64) {
        self.len -= 1;
        if place.shard == OUTSIDE {
            self.outside.remove(&key);
            if self.outside.is_empty() {
                self.outside = HashMap::new();
            }
            return;
        }
        let shard = &mut self.shards[place.shard as usize];
        shard.remove_at(place.at);
        if shard.is_sparse() {
            self.shrink(pages, place.shard, key);
        }
    }

    /// Sets the value of `key` to `f(its value, if it has one)`.
    #[inline]
    pub fn upsert(&mut self, pages: &mut PagePool, key: u64, f: impl FnOnce(Option<V>) -> V) {
        match self.find(key) {
            Found::At(place) => self.set_value(place, key, f(Some(self.value(place, key)))),
            Found::Vacant { place, .. } => {
                self.insert(pages, place, key, f(None));
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn insert_growing(&mut self, pages: &mut PagePool, key: u64, value: V) -> bool {
        let has_slot = key != VACANT && self.insert_in_slot(pages, key, value);
        if !has_slot {
            self.outside.insert(key, value);
        }
        has_slot
    }

    fn insert_in_slot(&mut self, pages: &mut PagePool, key: u64, value: V) -> bool {
        if self.directory.is_empty() {
            self.shards.push(Shard::new(pages, 0, 1));
            self.directory.push(0);
        }
        loop {
            let index = self.directory[prefix(key, self.depth)];
            let shard = &mut self.shards[index as usize];
            let shard::Found::Vacant { at, .. } = shard.find(key) else { unreachable!("the key was absent") };
            if shard.insert_at(at, key, value) {
                return true;
            }
            if !(shard.is_loaded() && (shard.grow(pages) || self.split(pages, index, key))) {
                return false;
            }
        }
    }

    /// Splits the shard that holds `key` by the next bit, doubling the directory when it is too short for it.
    fn split(&mut self, pages: &mut PagePool, index: u32, key: u64) -> bool {
        let depth = self.shards[index as usize].depth();
        if depth == DEPTH_MAX {
            return false;
        }
        let Some(upper) = self.shards[index as usize].split(pages) else { return false };
        if depth == self.depth {
            self.directory = self.directory.iter().flat_map(|&shard| [shard, shard]).collect();
            self.depth += 1;
        }
        let upper_index = self.place_shard(upper);
        let span = 1usize << (self.depth - depth);
        let begin = prefix(key, self.depth) & !(span - 1);
        self.directory[begin + span / 2..begin + span].fill(upper_index);
        true
    }

    fn place_shard(&mut self, shard: Shard<V>) -> u32 {
        if let Some(index) = self.free_shards.pop() {
            self.shards[index as usize] = shard;
            index
        } else {
            self.shards.push(shard);
            u32::try_from(self.shards.len() - 1).expect("fewer than 2^26 shards")
        }
    }

    /// Replaces the value of `key` by `f(value)`, or removes the key when that is None. Returns the old
    /// value.
    #[inline]
    pub fn update(&mut self, pages: &mut PagePool, key: u64, f: impl FnOnce(V) -> Option<V>) -> Option<V> {
        let Found::At(place) = self.find(key) else { return None };
        let old = self.value(place, key);
        match f(old) {
            Some(new) => self.set_value(place, key, new),
            None => self.remove_at(pages, place, key),
        }
        Some(old)
    }

    pub fn remove(&mut self, pages: &mut PagePool, key: u64) -> Option<V> {
        self.update(pages, key, |_| None)
    }

    #[cold]
    #[inline(never)]
    fn shrink(&mut self, pages: &mut PagePool, mut index: u32, key: u64) {
        if self.len == self.outside.len() {
            self.release(pages);
            return;
        }
        self.shards[index as usize].shrink(pages);
        while let Some(buddy) = self.buddy(index, key) {
            let (shard, other) = (&self.shards[index as usize], &self.shards[buddy as usize]);
            if !shard.fits_with(other) {
                return;
            }
            let depth = shard.depth();
            let (lower, upper) = if bit(key, depth - 1) { (buddy, index) } else { (index, buddy) };
            let mut taken = std::mem::replace(&mut self.shards[upper as usize], Shard::vacant());
            if !self.shards[lower as usize].absorb(pages, &mut taken) {
                self.shards[upper as usize] = taken;
                return;
            }
            self.free_shards.push(upper);
            let span = 1usize << (self.depth - (depth - 1));
            let begin = prefix(key, self.depth) & !(span - 1);
            self.directory[begin..begin + span].fill(lower);
            index = lower;
        }
    }

    /// The shard that differs from the one that holds `key` in its last bit alone, if it is as deep.
    fn buddy(&self, index: u32, key: u64) -> Option<u32> {
        let depth = self.shards[index as usize].depth();
        let bit = 1usize << self.depth.checked_sub(depth)?;
        let buddy = self.directory[(prefix(key, self.depth) ^ bit) & (self.directory.len() - 1)];
        (depth > 0 && self.shards[buddy as usize].depth() == depth).then_some(buddy)
    }

    fn release(&mut self, pages: &mut PagePool) {
        for shard in self.shards.drain(..) {
            shard.release(pages);
        }
        self.shards = Vec::new();
        self.free_shards = Vec::new();
        self.directory = Vec::new();
        self.depth = 0;
    }

    /// Takes out some entries, a few thousand at most; none only when there are none. Quicker than removing each.
    pub fn take_some(&mut self, pages: &mut PagePool) -> Vec<(u64, V)> {
        let mut entries: Vec<(u64, V)> = std::mem::take(&mut self.outside).into_iter().collect();
        if let Some(shard) = self.shards.iter_mut().find(|shard| !shard.is_empty()) {
            shard.for_each(|key, value| entries.push((key, value)));
            let empty = Shard::new(pages, shard.depth(), 1);
            std::mem::replace(shard, empty).release(pages);
        }
        self.len -= entries.len();
        if self.len == 0 {
            self.release(pages);
        }
        entries
    }

    /// Into how many parts of a few thousand entries the table falls; 0 when it is empty.
    pub fn n_parts(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        self.shards.len().max(1)
    }

    /// Calls `f` with every key and value of one part, in no order.
    pub fn for_each_in(&self, part: usize, mut f: impl FnMut(u64, V)) {
        if let Some(shard) = self.shards.get(part) {
            shard.for_each(&mut f);
        }
        if part == 0 {
            self.outside.iter().for_each(|(&key, &value)| f(key, value));
        }
    }

    /// Calls `f` with every key and value, in no order.
    pub fn for_each(&self, mut f: impl FnMut(u64, V)) {
        for part in 0..self.n_parts() {
            self.for_each_in(part, &mut f);
        }
    }
}

#[inline]
fn prefix(key: u64, depth: u32) -> usize {
    ((key >> 1) >> (63 - depth)) as usize
}

fn bit(key: u64, index: u32) -> bool {
    key >> (63 - index) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn same(table: &Table<u32>, twin: &BTreeMap<u64, u32>) {
        let mut listed = Vec::new();
        table.for_each(|key, value| listed.push((key, value)));
        listed.sort_unstable();
        assert!(listed.iter().copied().eq(twin.iter().map(|(&key, &value)| (key, value))));
        assert_eq!(table.len(), twin.len());
        for (&key, &value) in twin {
            assert_eq!(table.get(key), Some(value));
        }
    }

    #[test]
    fn equals_a_sorted_map_while_it_grows_and_shrinks() {
        let (mut pages, mut table, mut twin) = (PagePool::default(), Table::default(), BTreeMap::new());
        let mut state = 7;
        for round in 0..8u32 {
            for i in 0..40_000u32 {
                let key = if i == 5 { u64::MAX } else { random(&mut state) };
                table.upsert(&mut pages, key, |old| old.map_or(i, |old| old + 1));
                twin.entry(key).and_modify(|old| *old += 1).or_insert(i);
            }
            same(&table, &twin);
            let doomed: Vec<u64> =
                twin.keys().copied().filter(|key| (key >> 3) % 7 != u64::from(round)).collect();
            for key in doomed {
                assert_eq!(table.remove(&mut pages, key), twin.remove(&key));
                assert_eq!(table.remove(&mut pages, key), None);
            }
            same(&table, &twin);
        }
        for key in twin.keys() {
            table.remove(&mut pages, *key);
        }
        assert!(table.is_empty());
        assert_eq!(pages.used_bytes(), 0);
        assert_eq!(table.own_bytes(), 0);
    }

    #[test]
    fn keys_for_which_there_is_no_room_are_kept_outside() {
        for leading in [0, 1 << 63, u64::MAX << 32] {
            let (mut pages, mut table, mut twin) = (PagePool::default(), Table::default(), BTreeMap::new());
            for last in 0..30_000u32 {
                let key = leading | u64::from(last);
                table.upsert(&mut pages, key, |_| last);
                twin.insert(key, last);
            }
            assert!(!table.outside.is_empty());
            same(&table, &twin);
            for key in twin.keys().skip(10) {
                assert_eq!(table.remove(&mut pages, *key), Some(*key as u32));
            }
            assert_eq!(table.take_some(&mut pages).len() + table.take_some(&mut pages).len(), 10);
            assert_eq!((table.len(), pages.used_bytes(), table.own_bytes()), (0, 0, 0));
        }
    }

    #[test]
    fn a_large_table_is_dense() {
        let (mut pages, mut table) = (PagePool::default(), Table::<u32>::default());
        let mut state = 3;
        let mut densest: f64 = 0.0;
        for n in 1..1_000_000usize {
            table.upsert(&mut pages, random(&mut state), |_| 1);
            if n > 100_000 {
                densest = densest.max((pages.used_bytes() + table.own_bytes()) as f64 / n as f64);
            }
        }
        assert!(densest < 12.8 / 0.76, "{densest} bytes an entry");
    }
}
