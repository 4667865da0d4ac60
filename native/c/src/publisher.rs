//! What the engine's calls change: the mirror of each rank, and a bounded queue of frames not yet sent.
//!
//! No call waits for the worker. While there is no connection, or when the queue is full, frames are not kept:
//! the rank is sent again whole, from its mirror, later.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvrouter_core::hashing::{block_hashes, hash_seed};

use crate::address::Address;
use crate::frames::{self, Load};
use crate::link::{self, Socket};
use crate::mirror::{Mirror, MEDIA};

/// Ranks of one publisher; a worker has a handful.
pub const DP_RANKS: u32 = 4096;

pub struct Settings {
    pub address: Address,
    pub token: String,
    pub block_size: usize,
    pub queue_bytes_max: usize,
    pub held_blocks_max: usize,
}

/// Why a call did nothing.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    Invalid,
    UnknownParent,
    Full,
    Timeout,
}

/// Consecutive blocks, in the engine's own terms: token ids and its names of blocks.
pub struct Blocks<'a> {
    pub token_ids: &'a [u32],
    pub engine_hashes: &'a [u64],
    pub parent: Option<u64>,
    pub lora_name: &'a str,
    pub cache_namespace: &'a str,
    pub medium: usize,
}

#[derive(Default)]
pub(crate) struct Rank {
    pub mirror: Mirror,
    /// Nothing of it is queued: the rank must be sent whole.
    pub must_replace: bool,
    pub load: Option<Load>,
    pub load_is_news: bool,
}

#[derive(Clone, Default)]
pub struct Counts {
    pub connections: u64,
    pub replacements: u64,
    pub overflows: u64,
    pub dropped_events: u64,
    pub unknown_parents: u64,
    pub unknown_removed: u64,
}

#[derive(Default)]
pub(crate) struct State {
    pub ranks: BTreeMap<u32, Rank>,
    pub queue: Vec<u8>,
    pub queued_events: u64,
    pub held_blocks: usize,
    /// Calls so far, and how many of them the worker is known to have taken.
    pub reported: u64,
    pub arrived: u64,
    pub connected: bool,
    pub closing: bool,
    /// Kept so that closing can end a read or a write.
    pub socket: Option<Socket>,
    pub counts: Counts,
    pub error: String,
}

pub(crate) struct Shared {
    pub settings: Settings,
    pub state: Mutex<State>,
    /// There is something to send, or the publisher closes.
    pub work: Condvar,
    /// The worker took something, or the connection changed.
    pub progress: Condvar,
}

/// The state of a publisher, as `kvr_status` reports it.
pub struct Status {
    pub connected: bool,
    pub queued_bytes: usize,
    pub queued_events: u64,
    pub held_blocks: usize,
    pub counts: Counts,
    pub error: String,
}

pub struct Publisher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Publisher {
    /// Starts the thread that connects and sends; does not wait for a connection.
    pub fn open(settings: Settings) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            settings,
            state: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("kvrouter".into()).spawn(move || link::run(&for_thread))?;
        Ok(Publisher { shared, thread: Some(thread) })
    }

    pub fn stored(&self, dp_rank: u32, blocks: &Blocks) -> Result<(), Refused> {
        let block_size = self.shared.settings.block_size;
        let n_tokens = blocks.engine_hashes.len().checked_mul(block_size);
        if n_tokens != Some(blocks.token_ids.len()) || blocks.medium >= MEDIA {
            return Err(Refused::Invalid);
        }
        if blocks.engine_hashes.is_empty() {
            return Ok(());
        }
        let seed = hash_seed(blocks.lora_name, blocks.cache_namespace);
        let hashes = block_hashes(blocks.token_ids, block_size, seed, &[]);
        let Blocks { engine_hashes, parent, medium, .. } = *blocks;
        let mut state = self.shared.lock();
        if state.held_blocks + engine_hashes.len() > self.shared.settings.held_blocks_max {
            return Err(Refused::Full);
        }
        let rank = state.rank(dp_rank)?;
        let before = rank.mirror.blocks();
        if !rank.mirror.store(medium, parent, engine_hashes, &hashes) {
            state.counts.unknown_parents += 1;
            return Err(Refused::UnknownParent);
        }
        let added = rank.mirror.blocks() - before;
        state.held_blocks += added;
        self.shared.enqueue(&mut state, dp_rank, 40 + 16 * engine_hashes.len(), |queue| {
            frames::stored(queue, dp_rank, medium, parent, engine_hashes, &hashes);
        });
        Ok(())
    }

    pub fn removed(&self, dp_rank: u32, engine_hashes: &[u64], medium: usize) -> Result<(), Refused> {
        if medium >= MEDIA {
            return Err(Refused::Invalid);
        }
        if engine_hashes.is_empty() {
            return Ok(());
        }
        let mut state = self.shared.lock();
        let rank = state.rank(dp_rank)?;
        let before = rank.mirror.blocks();
        let unknown = rank.mirror.remove(medium, engine_hashes);
        let gone = before - rank.mirror.blocks();
        state.held_blocks -= gone;
        state.counts.unknown_removed += unknown;
        self.shared.enqueue(&mut state, dp_rank, 24 + 8 * engine_hashes.len(), |queue| {
            frames::removed(queue, dp_rank, medium, engine_hashes);
        });
        Ok(())
    }

    pub fn cleared(&self, dp_rank: u32) -> Result<(), Refused> {
        let mut state = self.shared.lock();
        let rank = state.rank(dp_rank)?;
        let gone = rank.mirror.blocks();
        rank.mirror.clear();
        state.held_blocks -= gone;
        self.shared.enqueue(&mut state, dp_rank, 16, |queue| frames::replace(queue, dp_rank));
        Ok(())
    }

    /// Only the latest load of a rank is kept.
    pub fn load(&self, dp_rank: u32, load: Load) -> Result<(), Refused> {
        let mut state = self.shared.lock();
        let rank = state.rank(dp_rank)?;
        rank.load = Some(load);
        rank.load_is_news = true;
        state.reported += 1;
        self.shared.work.notify_one();
        Ok(())
    }

    /// Waits until the worker has taken everything that was reported before this call, and has said so since.
    pub fn flush(&self, limit: Duration) -> Result<(), Refused> {
        let ends = Instant::now().checked_add(limit);
        let mut state = self.shared.lock();
        state.reported += 1;
        let goal = state.reported;
        self.shared.work.notify_one();
        while !(state.connected && state.arrived >= goal) {
            let left = match ends {
                None => limit,
                Some(ends) => ends.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() || state.closing {
                return Err(Refused::Timeout);
            }
            let waited = self.shared.progress.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    pub fn status(&self) -> Status {
        let state = self.shared.lock();
        Status {
            connected: state.connected,
            queued_bytes: state.queue.len(),
            queued_events: state.queued_events,
            held_blocks: state.held_blocks,
            counts: state.counts.clone(),
            error: state.error.clone(),
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        {
            let mut state = self.shared.lock();
            state.closing = true;
            if let Some(socket) = &state.socket {
                socket.shut();
            }
        }
        self.shared.work.notify_all();
        self.shared.progress.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread caught its own panics, so its result says nothing.
            drop(thread.join());
        }
    }
}

impl Shared {
    /// A panic in a call leaves the state usable: the counts may be off, the mirror is whole.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a change of a rank, unless the rank will be sent whole anyway.
    fn enqueue(&self, state: &mut State, dp_rank: u32, n_bytes: usize, write: impl FnOnce(&mut Vec<u8>)) {
        state.reported += 1;
        let is_replaced = state.ranks.get(&dp_rank).is_some_and(|rank| rank.must_replace);
        if state.connected && !is_replaced {
            if state.queue.len() + n_bytes > self.settings.queue_bytes_max {
                state.counts.overflows += 1;
                state.counts.dropped_events += 1 + state.queued_events;
                state.replace_all();
            } else {
                write(&mut state.queue);
                state.queued_events += 1;
            }
        }
        self.work.notify_one();
    }
}

impl State {
    /// Forgets what is queued: every rank will be sent whole, from its mirror.
    pub fn replace_all(&mut self) {
        self.queue = Vec::new();
        self.queued_events = 0;
        for rank in self.ranks.values_mut() {
            rank.must_replace = true;
        }
    }

    fn rank(&mut self, dp_rank: u32) -> Result<&mut Rank, Refused> {
        if dp_rank >= DP_RANKS {
            return Err(Refused::Invalid);
        }
        Ok(self.ranks.entry(dp_rank).or_insert_with(|| Rank { must_replace: true, ..Rank::default() }))
    }
}
