//! The ranks of mock engines on one clock: each lives its own steps, the earliest first.
//!
//! A rank is called when a step of it ends or may begin. Somebody outside is called only when something happened that
//! cannot wait: a first or a last token, KV that is wanted, a reader without credit. All else (a block that fills) is
//! kept until somebody looks.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::paged_kv::Event;
use crate::scheduler::{Chunk, Config, Ended, Load, Scheduler, Wanting};
use crate::sequence::{Content, Submitted};

/// One sequence of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle {
    pub rank: u32,
    pub slot: u32,
}

/// What one rank did since the last look.
#[derive(Default)]
pub struct Outputs {
    pub rank: u32,
    pub events: Vec<Event>,
    pub load: Option<Load>,
    pub chunks: Vec<Chunk>,
    pub seated: Vec<(u32, f64)>,
}

/// What somebody has to settle: sequences that ended, and sequences that want KV, each with its rank.
#[derive(Default)]
pub struct Notices {
    pub ended: Vec<(u32, Ended)>,
    pub wanting: Vec<(u32, Wanting)>,
}

struct Rank<C> {
    scheduler: Scheduler<C>,
    due_s: Option<f64>,
    is_touched: bool,
}

#[derive(Clone, Copy, PartialEq)]
struct Due {
    at_s: f64,
    rank: u32,
}

impl Eq for Due {}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_s.total_cmp(&other.at_s).then(self.rank.cmp(&other.rank))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

pub struct Ranks<C> {
    ranks: Vec<Option<Rank<C>>>,
    due: BinaryHeap<Reverse<Due>>,
    touched: Vec<u32>,
    notices: Notices,
}

impl<C: Content> Default for Ranks<C> {
    fn default() -> Self {
        Ranks { ranks: Vec::new(), due: BinaryHeap::new(), touched: Vec::new(), notices: Notices::default() }
    }
}

impl<C: Content> Ranks<C> {
    /// Adds a rank; its number is given once.
    pub fn add(&mut self, config: Config) -> u32 {
        let rank = self.ranks.len() as u32;
        self.ranks.push(Some(Rank { scheduler: Scheduler::new(config), due_s: None, is_touched: true }));
        self.touched.push(rank);
        rank
    }

    /// Takes a rank away with all that it holds. False when it is not here.
    pub fn remove(&mut self, rank: u32) -> bool {
        self.ranks.get_mut(rank as usize).is_some_and(|slot| slot.take().is_some())
    }

    pub fn scheduler(&self, rank: u32) -> Option<&Scheduler<C>> {
        self.ranks.get(rank as usize)?.as_ref().map(|rank| &rank.scheduler)
    }

    /// Has `change` done to a rank, which may then be due at another time; None when it is not here.
    pub fn change<R>(&mut self, rank: u32, change: impl FnOnce(&mut Scheduler<C>) -> R) -> Option<R> {
        let result = change(&mut self.ranks.get_mut(rank as usize)?.as_mut()?.scheduler);
        self.touch(rank);
        Some(result)
    }

    /// Hands a leg to a rank; None when it is not here.
    pub fn submit(
        &mut self,
        now: f64,
        rank: u32,
        submitted: Submitted<C>,
    ) -> Option<Result<Handle, C::Error>> {
        self.change(rank, |scheduler| scheduler.submit(now, submitted).map(|slot| Handle { rank, slot }))
    }

    /// When the first step ends or may begin.
    pub fn next_time(&mut self) -> Option<f64> {
        self.next_due().map(|due| due.at_s)
    }

    /// Lives all that is due before `until` (`through`: and at it), up to the first moment in which something happens
    /// that cannot wait; returns that moment. At the same moment more may be due.
    pub fn run(&mut self, until: f64, through: bool) -> Result<Option<f64>, C::Error> {
        while let Some(due) = self.next_due() {
            if due.at_s > until || (due.at_s == until && !through) {
                break;
            }
            self.due.pop();
            let Some(Some(rank)) = self.ranks.get_mut(due.rank as usize) else { continue };
            rank.due_s = None;
            let scheduler = &mut rank.scheduler;
            scheduler.advance(due.at_s)?;
            let is_urgent = std::mem::take(&mut scheduler.is_urgent) | !scheduler.wanting.is_empty();
            self.notices.ended.extend(scheduler.ended.drain(..).map(|ended| (due.rank, ended)));
            self.notices.wanting.extend(scheduler.wanting.drain(..).map(|wanting| (due.rank, wanting)));
            self.touch(due.rank);
            if is_urgent {
                return Ok(Some(due.at_s));
            }
        }
        Ok(None)
    }

    pub fn take_notices(&mut self) -> Notices {
        std::mem::take(&mut self.notices)
    }

    /// Whether any rank did something since the last `take_outputs`.
    pub fn has_outputs(&self) -> bool {
        !self.touched.is_empty()
    }

    /// What the ranks did since the last call, in the order of their numbers; loads only `with_loads`.
    pub fn take_outputs(&mut self, with_loads: bool) -> Vec<Outputs> {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        let mut all = Vec::new();
        for number in touched.drain(..) {
            let Some(Some(rank)) = self.ranks.get_mut(number as usize) else { continue };
            rank.is_touched = false;
            let scheduler = &mut rank.scheduler;
            let mut outputs = Outputs {
                rank: number,
                events: scheduler.kv.take_events(),
                load: if with_loads { scheduler.take_load() } else { None },
                seated: std::mem::take(&mut scheduler.seated),
                ..Outputs::default()
            };
            scheduler.take_chunks(&mut outputs.chunks);
            if !(outputs.events.is_empty()
                && outputs.load.is_none()
                && outputs.chunks.is_empty()
                && outputs.seated.is_empty())
            {
                all.push(outputs);
            }
        }
        self.touched = touched;
        all
    }

    fn touch(&mut self, number: u32) {
        let Some(Some(rank)) = self.ranks.get_mut(number as usize) else { return };
        if !rank.is_touched {
            rank.is_touched = true;
            self.touched.push(number);
        }
        let due_s = rank.scheduler.next_time();
        if let Some(at_s) = due_s.filter(|_| due_s != rank.due_s) {
            self.due.push(Reverse(Due { at_s, rank: number }));
        }
        rank.due_s = due_s;
    }

    /// The first entry that still holds.
    fn next_due(&mut self) -> Option<Due> {
        while let Some(&Reverse(due)) = self.due.peek() {
            if matches!(self.ranks.get(due.rank as usize), Some(Some(rank)) if rank.due_s == Some(due.at_s)) {
                return Some(due);
            }
            self.due.pop();
        }
        None
    }
}
