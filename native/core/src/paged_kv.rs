//! The KV memory of a mock engine's rank: a prefix cache of shared blocks, evicted leaf first, least recent first.
//!
//! A block is private while it fills, and cached once it is full: then any sequence that begins with the same tokens
//! may hold it. Cached blocks form a tree (a block's parent is the block before it). A sequence holds every block on
//! its path, so a block that nobody holds has no descendant that somebody holds, and what can be evicted is always at
//! the leaves.

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

/// One cached block. `released` says when it became unused; siblings are in the order of their creation.
#[derive(Clone)]
struct Block {
    parent: u32,
    first_child: u32,
    last_child: u32,
    before: u32,
    after: u32,
    depth: u32,
    holders: u32,
    released: u64,
    block_hash: u64,
    sequence_hash: u64,
    engine_hash: u64,
}

/// What one sequence holds: its cached blocks from the first on, and then `n_private` others.
#[derive(Default)]
struct Table {
    blocks: Vec<u32>,
    n_private: usize,
}

/// The order of eviction: the least recent, of those the deepest, of those the one offered first.
type Offer = Reverse<(u64, Reverse<u32>, u64, u32)>;

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
    n_offers: u64,
    blocks: Vec<Block>,
    spare: Vec<u32>,
    /// Every cached block, found by its parent and its hash.
    children: HashTable<u32>,
    tables: HashMap<u64, Table>,
    next_table: u64,
    offers: BinaryHeap<Offer>,
    events: Vec<Event>,
    gone: Vec<u64>,
}

impl PagedKv {
    /// `opaque`: the engine's names for blocks are drawn from `seed`, instead of following from their content.
    pub fn new(total_blocks: usize, opaque: bool, seed: u64, caching: bool) -> Self {
        let root = Block {
            parent: NONE,
            first_child: NONE,
            last_child: NONE,
            before: NONE,
            after: NONE,
            depth: 0,
            holders: 0,
            released: NEVER,
            block_hash: 0,
            sequence_hash: 0,
            engine_hash: 0,
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
            n_offers: 0,
            blocks: vec![root],
            spare: Vec::new(),
            children: HashTable::new(),
            tables: HashMap::new(),
            next_table: 0,
            offers: BinaryHeap::new(),
            events: Vec::new(),
            gone: Vec::new(),
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
        self.path(hashes.take(blocks_max)).count()
    }

    /// Holds the first `n_matched` blocks of the sequence, which are cached, and allocates `n_private` more, evicting
    /// as needed. None when they do not fit.
    pub fn hold(
        &mut self,
        hashes: impl Iterator<Item = u64>,
        n_matched: usize,
        n_private: usize,
    ) -> Option<u64> {
        let blocks: Vec<u32> = self.path(hashes.take(n_matched)).collect();
        let woken = blocks.iter().filter(|&&id| self.blocks[id as usize].holders == 0).count();
        if n_private > self.free + self.idle - woken {
            return None;
        }
        self.idle -= woken;
        for &id in &blocks {
            self.blocks[id as usize].holders += 1;
        }
        let handle = self.next_table;
        self.next_table += 1;
        self.tables.insert(handle, Table { blocks, n_private });
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
            table.blocks.len() + table.n_private
        }))
    }

    /// Caches the private blocks of the table up to its first `n_full`, which are full; `hashes` are those of all
    /// its blocks from the first on. A block that another sequence cached meanwhile is shared instead, and the
    /// private one is free again. False for a table that is not held, or one with fewer blocks or hashes.
    pub fn commit(&mut self, handle: u64, hashes: impl Iterator<Item = u64>, n_full: usize) -> bool {
        let Some(table) = self.tables.get_mut(&handle) else {
            return false;
        };
        let n_cached = table.blocks.len();
        if !self.caching || n_full <= n_cached {
            return true;
        }
        let new: Vec<u64> = hashes.skip(n_cached).take(n_full - n_cached).collect();
        if new.len() > table.n_private || new.len() < n_full - n_cached {
            return false;
        }
        table.n_private -= new.len();
        let mut blocks = std::mem::take(&mut table.blocks);
        let mut parent = blocks.last().copied().unwrap_or(ROOT);
        let mut shared = 0;
        while let Some(child) = new.get(shared).and_then(|&hash| self.child(parent, hash)) {
            let block = &mut self.blocks[child as usize];
            if block.holders == 0 {
                self.idle -= 1;
            }
            block.holders += 1;
            self.free += 1;
            blocks.push(child);
            parent = child;
            shared += 1;
        }
        if shared < new.len() {
            self.store(&mut blocks, parent, &new[shared..]);
        }
        if let Some(table) = self.tables.get_mut(&handle) {
            table.blocks = blocks;
        }
        true
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
        for &id in table.blocks.iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.holders -= 1;
            if block.holders == 0 {
                block.released = released;
                self.idle += 1;
                if block.first_child == NONE {
                    self.offer(id);
                }
            }
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
            let mut run = vec![start];
            let mut id = start;
            loop {
                let mut children = self.children_of(id);
                let Some(first) = children.next() else { break };
                starts.extend(children);
                run.push(first);
                id = first;
            }
            events.push(self.stored(&run));
        }
        events
    }

    /// Every way in which the books differ from `tables`, which is all that holds blocks.
    pub fn check_integrity(&self, tables: &[u64]) -> Vec<String> {
        let mut problems = Vec::new();
        let mut holders = vec![0u32; self.blocks.len()];
        let mut n_private = 0;
        for handle in tables {
            let Some(table) = self.tables.get(handle) else {
                problems.push(format!("table {handle} is not held"));
                continue;
            };
            n_private += table.n_private;
            for &id in &table.blocks {
                holders[id as usize] += 1;
            }
        }
        if self.tables.len() > tables.len() {
            problems.push(format!("{} tables are held by nobody", self.tables.len() - tables.len()));
        }
        let (mut n_cached, mut n_idle) = (0, 0);
        let mut ids: Vec<u32> = self.children_of(ROOT).collect();
        while let Some(id) = ids.pop() {
            ids.extend(self.children_of(id));
            let block = &self.blocks[id as usize];
            n_cached += 1;
            n_idle += usize::from(block.holders == 0);
            if block.holders != std::mem::take(&mut holders[id as usize]) {
                problems.push(format!("block {:#x} counts {} holders", block.engine_hash, block.holders));
            }
        }
        let stray = holders.iter().filter(|&&count| count > 0).count();
        if stray > 0 {
            problems.push(format!("{stray} held blocks are not in the cache"));
        }
        if n_idle != self.idle {
            problems.push(format!("{n_idle} cached blocks are idle, the books say {}", self.idle));
        }
        if n_cached as u64 != self.cached_blocks() || n_cached != self.children.len() {
            problems.push(format!("{n_cached} blocks are cached, the books say {}", self.cached_blocks()));
        }
        if n_cached + n_private + self.free != self.total {
            problems.push(format!(
                "{n_cached} blocks are cached and {n_private} private of {}, the books say that {} are free",
                self.total, self.free
            ));
        }
        problems
    }

    fn path<'a>(&'a self, hashes: impl Iterator<Item = u64> + 'a) -> impl Iterator<Item = u32> + 'a {
        let mut parent = ROOT;
        hashes.map_while(move |hash| {
            let child = self.child(parent, hash)?;
            parent = child;
            Some(child)
        })
    }

    fn child(&self, parent: u32, hash: u64) -> Option<u32> {
        let is_it = |&id: &u32| {
            let block = &self.blocks[id as usize];
            block.parent == parent && block.block_hash == hash
        };
        self.children.find(child_key(parent, hash), is_it).copied()
    }

    fn children_of(&self, id: u32) -> impl Iterator<Item = u32> + '_ {
        let mut next = self.blocks[id as usize].first_child;
        std::iter::from_fn(move || {
            let id = next;
            if id == NONE {
                return None;
            }
            next = self.blocks[id as usize].after;
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

    fn store(&mut self, blocks: &mut Vec<u32>, mut parent: u32, hashes: &[u64]) {
        let begin = blocks.len();
        for &block_hash in hashes {
            let before = &self.blocks[parent as usize];
            let sequence_hash = chain((before.depth > 0).then_some(before.sequence_hash), block_hash);
            let engine_hash = if self.opaque {
                let name = self.next_name;
                self.next_name = name.wrapping_add(1);
                finish64(name)
            } else {
                sequence_hash ^ SPREAD
            };
            let block = Block {
                parent,
                first_child: NONE,
                last_child: NONE,
                before: before.last_child,
                after: NONE,
                depth: before.depth + 1,
                holders: 1,
                released: NEVER,
                block_hash,
                sequence_hash,
                engine_hash,
            };
            let id = self.add(block);
            let blocks_by_id = &self.blocks;
            self.children.insert_unique(child_key(parent, block_hash), id, |&id| {
                let block = &blocks_by_id[id as usize];
                child_key(block.parent, block.block_hash)
            });
            blocks.push(id);
            parent = id;
        }
        self.stored += hashes.len() as u64;
        self.flush_gone();
        let event = self.stored(&blocks[begin..]);
        self.events.push(event);
    }

    fn add(&mut self, block: Block) -> u32 {
        let (parent, before) = (block.parent as usize, block.before);
        let id = if let Some(id) = self.spare.pop() {
            self.blocks[id as usize] = block;
            id
        } else {
            self.blocks.push(block);
            (self.blocks.len() - 1) as u32
        };
        if before == NONE {
            self.blocks[parent].first_child = id;
        } else {
            self.blocks[before as usize].after = id;
        }
        self.blocks[parent].last_child = id;
        id
    }

    fn evict(&mut self, n_blocks: usize) -> Result<(), NoRoom> {
        if n_blocks > self.idle {
            return Err(NoRoom { wanted: n_blocks, evictable: self.idle });
        }
        let mut next = None;
        for _ in 0..n_blocks {
            let id = next.take().unwrap_or_else(|| self.least_recent_leaf());
            let block = &mut self.blocks[id as usize];
            let released = std::mem::replace(&mut block.released, NEVER);
            let (parent, before, after, hash) = (block.parent, block.before, block.after, block.block_hash);
            self.gone.push(block.engine_hash);
            if let Ok(entry) = self.children.find_entry(child_key(parent, hash), |&other| other == id) {
                entry.remove();
            }
            match before {
                NONE => self.blocks[parent as usize].first_child = after,
                _ => self.blocks[before as usize].after = after,
            }
            match after {
                NONE => self.blocks[parent as usize].last_child = before,
                _ => self.blocks[after as usize].before = before,
            }
            self.spare.push(id);
            let left = &self.blocks[parent as usize];
            if parent != ROOT && left.first_child == NONE && left.holders == 0 {
                if left.released == released {
                    next = Some(parent); // what one table gave up is one path: nothing comes between
                } else {
                    self.offer(parent);
                }
            }
        }
        if let Some(leaf) = next {
            self.offer(leaf);
        }
        self.idle -= n_blocks;
        self.free += n_blocks;
        self.evicted += n_blocks as u64;
        Ok(())
    }

    fn least_recent_leaf(&mut self) -> u32 {
        while let Some(Reverse((released, _, _, id))) = self.offers.pop() {
            if self.can_evict(id, released) {
                return id;
            }
        }
        unreachable!("an idle block has a leaf below it that nobody holds, and every such leaf is offered")
    }

    /// True when nobody held the block since it was offered, so that it is a leaf still.
    fn can_evict(&self, id: u32, released: u64) -> bool {
        let block = &self.blocks[id as usize];
        block.holders == 0 && block.released == released
    }

    fn offer(&mut self, leaf: u32) {
        let block = &self.blocks[leaf as usize];
        self.offers.push(Reverse((block.released, Reverse(block.depth), self.n_offers, leaf)));
        self.n_offers += 1;
        if self.offers.len() > 2 * self.idle + STALE_ENTRIES_MAX {
            let mut offers = std::mem::take(&mut self.offers);
            offers.retain(|Reverse((released, _, _, id))| self.can_evict(*id, *released));
            self.offers = offers;
        }
    }

    fn flush_gone(&mut self) {
        if !self.gone.is_empty() {
            self.events.push(Event::Removed { engine_hashes: std::mem::take(&mut self.gone) });
        }
    }

    fn stored(&self, run: &[u32]) -> Event {
        let parent = &self.blocks[self.blocks[run[0] as usize].parent as usize];
        let of_run =
            |hash: fn(&Block) -> u64| run.iter().map(|&id| hash(&self.blocks[id as usize])).collect();
        Event::Stored {
            parent: (parent.depth > 0).then_some(parent.engine_hash),
            engine_hashes: of_run(|block| block.engine_hash),
            block_hashes: of_run(|block| block.block_hash),
        }
    }
}

fn child_key(parent: u32, hash: u64) -> u64 {
    finish64(hash ^ u64::from(parent).wrapping_mul(SPREAD))
}
