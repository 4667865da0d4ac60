//! The KV memory of a mock engine's rank: a prefix cache of shared blocks, evicted leaf first, least recent first.
//!
//! A block is private while it fills, and cached once it is full: then any sequence that begins with the same tokens
//! may hold it. Cached blocks form a tree (a block's parent is the block before it). A sequence holds every block on
//! its path, so a block that nobody holds has no descendant that somebody holds, and what can be evicted is always at
//! the leaves.
//!
//! The tree is one of runs: blocks that follow each other, have the same holders and were given up together. A
//! sequence ends where a run ends; one that shares only the beginning of a run splits it. Prompts of thousands of
//! blocks then cost a few lookups, and their blocks lie in a row.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::{HashMap, HashTable};

use crate::hashing::{chain, finish64};

/// Entries of blocks that are in use again, above twice the idle blocks, before the heap is swept.
const STALE_ENTRIES_MAX: usize = 1_024;

/// What sets a deterministic engine's name for a block apart from its sequence hash.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

const ROOT: u32 = 0;
const NONE: u32 = u32::MAX;
const NEVER: u64 = u64::MAX;

/// What a rank reports: blocks in the order of their sequence, or the names of blocks that are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Stored { parent: Option<u64>, engine_hashes: Vec<u64>, block_hashes: Vec<u64> },
    Removed { engine_hashes: Vec<u64> },
}

/// More blocks were wanted than are free or can be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    pub wanted: usize,
    pub evictable: usize,
}

#[derive(Clone, Copy)]
struct Block {
    block_hash: u64,
    sequence_hash: u64,
    engine_hash: u64,
}

/// Cached blocks in a row, at least one but in the root. `released` says when they became unused; siblings are in the
/// order of their creation.
struct Run {
    parent: u32,
    first_child: u32,
    last_child: u32,
    before: u32,
    after: u32,
    holders: u32,
    released: u64,
    blocks: Vec<Block>,
}

/// Where a sequence leaves the tree: after the first `within` blocks of a run, and `n_blocks` below its start.
struct Place {
    run: u32,
    within: usize,
    n_blocks: usize,
}

/// What one sequence holds: the `n_cached` blocks on the path to the end of a run, and then `n_private` others.
struct Table {
    end: u32,
    n_cached: usize,
    n_private: usize,
}

/// The least recent comes first. What one sequence gave up is one path, so no two leaves were given up together.
type Offer = Reverse<(u64, u32)>;

pub struct PagedKv {
    total: usize,
    free: usize,
    idle: usize,
    stored: u64,
    evicted: u64,
    caching: bool,
    opaque: bool,
    next_name: u64,
    clock: u64,
    runs: Vec<Run>,
    spare: Vec<u32>,
    /// Every run, found by its parent and its first block's hash.
    children: HashTable<u32>,
    tables: HashMap<u64, Table>,
    next_table: u64,
    offers: BinaryHeap<Offer>,
    events: Vec<Event>,
    gone: Vec<u64>,
    /// The hashes of the blocks that are committed at this moment.
    scratch: Vec<u64>,
}

impl PagedKv {
    /// `opaque`: the engine's names for blocks are drawn from `seed`, instead of following from their content.
    pub fn new(total_blocks: usize, opaque: bool, seed: u64, caching: bool) -> Self {
        let root = Run {
            parent: NONE,
            first_child: NONE,
            last_child: NONE,
            before: NONE,
            after: NONE,
            holders: 0,
            released: NEVER,
            blocks: Vec::new(),
        };
        PagedKv {
            total: total_blocks,
            free: total_blocks,
            idle: 0,
            stored: 0,
            evicted: 0,
            caching,
            opaque,
            next_name: finish64(seed),
            clock: 0,
            runs: vec![root],
            spare: Vec::new(),
            children: HashTable::new(),
            tables: HashMap::new(),
            next_table: 0,
            offers: BinaryHeap::new(),
            events: Vec::new(),
            gone: Vec::new(),
            scratch: Vec::new(),
        }
    }

    pub fn total_blocks(&self) -> usize {
        self.total
    }

    pub fn free_blocks(&self) -> usize {
        self.free
    }

    /// Cached blocks that nobody holds.
    pub fn idle_blocks(&self) -> usize {
        self.idle
    }

    /// Blocks that somebody holds.
    pub fn active_blocks(&self) -> usize {
        self.total - self.free - self.idle
    }

    /// Blocks whose content others can use, idle or held.
    pub fn cached_blocks(&self) -> u64 {
        self.stored - self.evicted
    }

    /// Entries of the heap of what can be evicted, stale ones included.
    pub fn n_offers(&self) -> usize {
        self.offers.len()
    }

    /// How many cached blocks begin this sequence, at most `blocks_max`.
    pub fn matched(&self, hashes: impl Iterator<Item = u64>, blocks_max: usize) -> usize {
        self.descend(ROOT, hashes.take(blocks_max)).n_blocks
    }

    /// Holds the first `n_matched` blocks of the sequence, which are cached, and allocates `n_private` more, evicting
    /// as needed. None when they do not fit.
    pub fn hold(
        &mut self,
        hashes: impl Iterator<Item = u64>,
        n_matched: usize,
        n_private: usize,
    ) -> Option<u64> {
        let place = self.descend(ROOT, hashes.take(n_matched));
        if n_private > self.free + self.idle - self.idle_before(&place) {
            return None;
        }
        let end = self.split(&place);
        self.hold_path(end, ROOT);
        let handle = self.next_table;
        self.next_table += 1;
        self.tables.insert(handle, Table { end, n_cached: place.n_blocks, n_private });
        self.take(n_private).ok()?;
        Some(handle)
    }

    pub fn can_grow(&self, n_private: usize) -> bool {
        n_private <= self.free + self.idle
    }

    /// Allocates `n_private` blocks for the table, evicting as needed. Returns how many blocks it holds then; None
    /// for a table that is not held.
    pub fn grow(&mut self, handle: u64, n_private: usize) -> Result<Option<usize>, NoRoom> {
        if !self.tables.contains_key(&handle) {
            return Ok(None);
        }
        self.take(n_private)?;
        Ok(self.tables.get_mut(&handle).map(|table| {
            table.n_private += n_private;
            table.n_cached + table.n_private
        }))
    }

    /// Caches the private blocks of the table up to its first `n_full`, which are full; `hashes` are those of all
    /// its blocks from the first on. A block that another sequence cached meanwhile is shared instead, and the
    /// private one is free again. False for a table that is not held, or one with fewer blocks or hashes.
    pub fn commit(&mut self, handle: u64, hashes: impl Iterator<Item = u64>, n_full: usize) -> bool {
        let Some(table) = self.tables.get_mut(&handle) else {
            return false;
        };
        let Table { end, n_cached, .. } = *table;
        if !self.caching || n_full <= n_cached {
            return true;
        }
        let n_new = n_full - n_cached;
        let mut new = std::mem::take(&mut self.scratch);
        new.clear();
        new.extend(hashes.skip(n_cached).take(n_new));
        let fits = new.len() == n_new && n_new <= table.n_private;
        if fits {
            table.n_private -= n_new;
            let place = self.descend(end, new.iter().copied());
            let mut end_now = self.split(&place);
            self.hold_path(end_now, end);
            self.free += place.n_blocks;
            if place.n_blocks < n_new {
                end_now = self.store(end_now, &new[place.n_blocks..]);
            }
            if let Some(table) = self.tables.get_mut(&handle) {
                table.end = end_now;
                table.n_cached = n_full;
            }
        }
        self.scratch = new;
        fits
    }

    /// Gives up every block of the table: private ones are free, cached ones stay until evicted. False for a table
    /// that is not held.
    pub fn release(&mut self, handle: u64) -> bool {
        let Some(table) = self.tables.remove(&handle) else {
            return false;
        };
        self.free += table.n_private;
        let released = self.clock;
        self.clock += 1;
        let mut id = table.end;
        while id != ROOT {
            let run = &mut self.runs[id as usize];
            let parent = run.parent;
            run.holders -= 1;
            if run.holders == 0 {
                run.released = released;
                self.idle += run.blocks.len();
                if run.first_child == NONE {
                    self.offer(id);
                }
            }
            id = parent;
        }
        true
    }

    /// What was stored and removed since the last call, in order.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.flush_gone();
        std::mem::take(&mut self.events)
    }

    /// All cached blocks as stores, parents first.
    pub fn snapshot(&self) -> Vec<Event> {
        let mut events = Vec::new();
        let mut starts: Vec<u32> = self.children_of(ROOT).collect();
        while let Some(start) = starts.pop() {
            let mut runs = vec![start];
            let mut id = start;
            loop {
                let mut children = self.children_of(id);
                let Some(first) = children.next() else { break };
                starts.extend(children);
                runs.push(first);
                id = first;
            }
            let blocks = runs.iter().flat_map(|&id| &self.runs[id as usize].blocks);
            let (engine_hashes, block_hashes) =
                blocks.map(|block| (block.engine_hash, block.block_hash)).unzip();
            events.push(Event::Stored {
                parent: self.last_of(self.runs[start as usize].parent).map(|block| block.engine_hash),
                engine_hashes,
                block_hashes,
            });
        }
        events
    }

    /// Every way in which the books differ from `tables`, which is all that holds blocks.
    pub fn check_integrity(&self, tables: &[u64]) -> Vec<String> {
        let mut problems = Vec::new();
        let mut holders = vec![0u32; self.runs.len()];
        let mut n_private = 0;
        for handle in tables {
            let Some(table) = self.tables.get(handle) else {
                problems.push(format!("table {handle} is not held"));
                continue;
            };
            n_private += table.n_private;
            let (mut id, mut n_cached) = (table.end, 0);
            while id != ROOT {
                holders[id as usize] += 1;
                n_cached += self.runs[id as usize].blocks.len();
                id = self.runs[id as usize].parent;
            }
            if n_cached != table.n_cached {
                problems.push(format!(
                    "table {handle} holds {n_cached} blocks, its book says {}",
                    table.n_cached
                ));
            }
        }
        if self.tables.len() > tables.len() {
            problems.push(format!("{} tables are held by nobody", self.tables.len() - tables.len()));
        }
        let (mut n_runs, mut n_cached, mut n_idle) = (0, 0, 0);
        let mut ids: Vec<u32> = self.children_of(ROOT).collect();
        while let Some(id) = ids.pop() {
            ids.extend(self.children_of(id));
            let run = &self.runs[id as usize];
            let Some(first) = run.blocks.first() else {
                problems.push(format!("run {id} has no block"));
                continue;
            };
            n_runs += 1;
            n_cached += run.blocks.len();
            n_idle += if run.holders == 0 { run.blocks.len() } else { 0 };
            if run.holders != std::mem::take(&mut holders[id as usize]) {
                problems.push(format!("block {:#x} counts {} holders", first.engine_hash, run.holders));
            }
        }
        let stray = holders.iter().filter(|&&count| count > 0).count();
        if stray > 0 {
            problems.push(format!("{stray} held runs of blocks are not in the cache"));
        }
        if n_idle != self.idle {
            problems.push(format!("{n_idle} cached blocks are idle, the books say {}", self.idle));
        }
        if n_cached as u64 != self.cached_blocks() {
            problems.push(format!("{n_cached} blocks are cached, the books say {}", self.cached_blocks()));
        }
        if n_runs != self.children.len() {
            problems
                .push(format!("{n_runs} runs of blocks are cached, {} can be found", self.children.len()));
        }
        if n_cached + n_private + self.free != self.total {
            problems.push(format!(
                "{n_cached} blocks are cached and {n_private} private of {}, the books say that {} are free",
                self.total, self.free
            ));
        }
        problems
    }

    /// How far the tree below `from` goes along with the hashes.
    fn descend(&self, from: u32, mut hashes: impl Iterator<Item = u64>) -> Place {
        let mut place = Place { run: from, within: self.runs[from as usize].blocks.len(), n_blocks: 0 };
        let mut next = hashes.next();
        while let Some(child) = next.and_then(|hash| self.child(place.run, hash)) {
            let blocks = &self.runs[child as usize].blocks;
            let mut within = 1;
            next = hashes.next();
            while next.is_some() && blocks.get(within).map(|block| block.block_hash) == next {
                within += 1;
                next = hashes.next();
            }
            place = Place { run: child, within, n_blocks: place.n_blocks + within };
            if within < blocks.len() {
                break;
            }
        }
        place
    }

    fn child(&self, parent: u32, hash: u64) -> Option<u32> {
        if self.runs[parent as usize].first_child == NONE {
            return None;
        }
        let is_it = |&id: &u32| {
            let run = &self.runs[id as usize];
            run.parent == parent && run.blocks[0].block_hash == hash
        };
        self.children.find(child_key(parent, hash), is_it).copied()
    }

    /// How many blocks on the way to a place nobody holds: what is above a held run is held.
    fn idle_before(&self, place: &Place) -> usize {
        let (mut id, mut n_blocks, mut idle) = (place.run, place.within, 0);
        while id != ROOT && self.runs[id as usize].holders == 0 {
            idle += n_blocks;
            id = self.runs[id as usize].parent;
            n_blocks = self.runs[id as usize].blocks.len();
        }
        idle
    }

    /// Makes one more sequence hold the runs from `end` up to `top`, which it holds already.
    fn hold_path(&mut self, end: u32, top: u32) {
        let mut id = end;
        while id != top {
            let run = &mut self.runs[id as usize];
            if run.holders == 0 {
                self.idle -= run.blocks.len();
            }
            run.holders += 1;
            id = run.parent;
        }
    }

    /// The run that ends at a place: a new one, with the first blocks of the old, where the place is inside a run.
    /// The rest keeps its number, because sequences and runs below know it by that.
    fn split(&mut self, place: &Place) -> u32 {
        let id = place.run;
        let run = &mut self.runs[id as usize];
        if place.within == run.blocks.len() {
            return id;
        }
        let rest = run.blocks.split_off(place.within);
        let rest_key_hash = rest[0].block_hash;
        let begin = std::mem::replace(&mut run.blocks, rest);
        let key = child_key(run.parent, begin[0].block_hash);
        let upper = Run {
            parent: run.parent,
            first_child: id,
            last_child: id,
            before: std::mem::replace(&mut run.before, NONE),
            after: std::mem::replace(&mut run.after, NONE),
            holders: run.holders,
            released: run.released,
            blocks: begin,
        };
        let upper_id = self.allocate(upper);
        self.runs[id as usize].parent = upper_id;
        self.link(upper_id);
        let entry = self.children.find_mut(key, |&other| other == id);
        *entry.expect("every run can be found") = upper_id;
        self.index(id, child_key(upper_id, rest_key_hash));
        upper_id
    }

    fn children_of(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.runs[id as usize].first_child;
        std::iter::from_fn(move || {
            let id = next;
            if id == NONE {
                return None;
            }
            next = self.runs[id as usize].after;
            Some(id)
        })
    }

    fn take(&mut self, n_private: usize) -> Result<(), NoRoom> {
        if n_private > self.free {
            self.evict(n_private - self.free)?;
        }
        self.free -= n_private;
        Ok(())
    }

    /// Caches blocks after the run `end`, for the one sequence that holds them; returns the run that they end.
    fn store(&mut self, end: u32, hashes: &[u64]) -> u32 {
        let last = self.last_of(end);
        let mut previous = last.map(|block| block.sequence_hash);
        let blocks: Vec<Block> = hashes
            .iter()
            .map(|&block_hash| {
                let sequence_hash = chain(previous, block_hash);
                previous = Some(sequence_hash);
                let engine_hash = if self.opaque {
                    let name = self.next_name;
                    self.next_name = name.wrapping_add(1);
                    finish64(name)
                } else {
                    content_name(sequence_hash)
                };
                Block { block_hash, sequence_hash, engine_hash }
            })
            .collect();
        self.flush_gone();
        self.events.push(Event::Stored {
            parent: last.map(|block| block.engine_hash),
            engine_hashes: blocks.iter().map(|block| block.engine_hash).collect(),
            block_hashes: hashes.to_vec(),
        });
        self.stored += hashes.len() as u64;
        let run = &mut self.runs[end as usize];
        if run.holders == 1 && run.first_child == NONE {
            run.blocks.extend_from_slice(&blocks); // nobody else has or follows it
            return end;
        }
        let run = Run {
            parent: end,
            first_child: NONE,
            last_child: NONE,
            before: run.last_child,
            after: NONE,
            holders: 1,
            released: NEVER,
            blocks,
        };
        let id = self.allocate(run);
        self.link(id);
        self.index(id, child_key(end, hashes[0]));
        id
    }

    /// Gives a run its number.
    fn allocate(&mut self, run: Run) -> u32 {
        if let Some(id) = self.spare.pop() {
            self.runs[id as usize] = run;
            id
        } else {
            self.runs.push(run);
            (self.runs.len() - 1) as u32
        }
    }

    /// Makes the siblings and the parent of a run name it.
    fn link(&mut self, id: u32) {
        let Run { parent, before, after, .. } = self.runs[id as usize];
        self.join(parent, before, after, (id, id));
    }

    /// Between two children of a parent, NONE at its ends: makes the one before name `place.0` as the next, and the
    /// one after `place.1` as the one before.
    fn join(&mut self, parent: u32, before: u32, after: u32, place: (u32, u32)) {
        match before {
            NONE => self.runs[parent as usize].first_child = place.0,
            _ => self.runs[before as usize].after = place.0,
        }
        match after {
            NONE => self.runs[parent as usize].last_child = place.1,
            _ => self.runs[after as usize].before = place.1,
        }
    }

    /// Makes a run found by its parent and its first block.
    fn index(&mut self, id: u32, key: u64) {
        let runs = &self.runs;
        self.children.insert_unique(key, id, |&id| {
            let run = &runs[id as usize];
            child_key(run.parent, run.blocks[0].block_hash)
        });
    }

    fn evict(&mut self, n_blocks: usize) -> Result<(), NoRoom> {
        if n_blocks > self.idle {
            return Err(NoRoom { wanted: n_blocks, evictable: self.idle });
        }
        let (mut next, mut n_left) = (None, n_blocks);
        while n_left > 0 {
            let id = next.take().unwrap_or_else(|| self.least_recent_leaf());
            let run = &mut self.runs[id as usize];
            let n_kept = run.blocks.len().saturating_sub(n_left);
            let first = run.blocks[0].block_hash;
            n_left -= run.blocks.len() - n_kept;
            self.gone.extend(run.blocks.drain(n_kept..).rev().map(|block| block.engine_hash));
            if n_kept > 0 {
                next = Some(id);
                break;
            }
            next = self.remove(id, first);
        }
        if let Some(leaf) = next {
            self.offer(leaf);
        }
        self.idle -= n_blocks;
        self.free += n_blocks;
        self.evicted += n_blocks as u64;
        Ok(())
    }

    /// Takes a run out of the tree whose blocks, beginning with `first`, are gone. Returns its parent if that is the
    /// next to be evicted.
    fn remove(&mut self, id: u32, first: u64) -> Option<u32> {
        let run = &mut self.runs[id as usize];
        run.blocks = Vec::new();
        let released = std::mem::replace(&mut run.released, NEVER);
        let (parent, before, after) = (run.parent, run.before, run.after);
        let entry = self.children.find_entry(child_key(parent, first), |&other| other == id);
        entry.expect("every run can be found").remove();
        self.join(parent, before, after, (after, before));
        self.spare.push(id);
        let left = &self.runs[parent as usize];
        if parent == ROOT || left.first_child != NONE || left.holders > 0 {
            return None;
        }
        if left.released == released {
            return Some(parent); // what one table gave up is one path: nothing comes between
        }
        self.offer(parent);
        None
    }

    fn least_recent_leaf(&mut self) -> u32 {
        while let Some(Reverse((released, id))) = self.offers.pop() {
            if self.can_evict(id, released) {
                return id;
            }
        }
        unreachable!("an idle run has a leaf below it that nobody holds, and every such leaf is offered")
    }

    /// True when nobody held the run since it was offered, so that it is a leaf still.
    fn can_evict(&self, id: u32, released: u64) -> bool {
        let run = &self.runs[id as usize];
        run.holders == 0 && run.released == released
    }

    fn offer(&mut self, leaf: u32) {
        self.offers.push(Reverse((self.runs[leaf as usize].released, leaf)));
        if self.offers.len() > 2 * self.idle + STALE_ENTRIES_MAX {
            let mut offers = std::mem::take(&mut self.offers);
            offers.retain(|&Reverse((released, id))| self.can_evict(id, released));
            self.offers = offers;
        }
    }

    fn flush_gone(&mut self) {
        if !self.gone.is_empty() {
            self.events.push(Event::Removed { engine_hashes: std::mem::take(&mut self.gone) });
        }
    }

    /// The last block of a run; None of the root.
    fn last_of(&self, id: u32) -> Option<Block> {
        self.runs[id as usize].blocks.last().copied()
    }
}

/// The name of a block by its content.
pub fn content_name(sequence_hash: u64) -> u64 {
    sequence_hash ^ SPREAD
}

/// The sequence hash of a block that is named by its content.
pub fn sequence_of(content_name: u64) -> u64 {
    content_name ^ SPREAD
}

fn child_key(parent: u32, hash: u64) -> u64 {
    finish64(hash ^ u64::from(parent).wrapping_mul(SPREAD))
}
