//! Which link leads from one slot to another, and what else travels over it; `kvrouter.kernel.routing.fleet_links` has the rules.
//!
//! Destinations are kept in an order in which those that are near each other are neighbours, so that the links from one
//! place are a few runs of it. The runs of a place are found when they are first asked for.

use std::collections::HashMap;
use std::sync::Arc;

/// The id of a domain's value where a slot has none.
pub const UNKNOWN: i32 = -1;

/// What is shared by nobody: the link of places of which nobody knows how they are connected.
pub const ALONE: u64 = 0;

/// A level of a worker's order: the domain's column, and which link those have who share its value.
#[derive(Clone, Copy)]
pub struct Level {
    pub domain: usize,
    pub link: Option<u32>,
}

/// A link that was measured between two values of a domain.
#[derive(Clone, Copy)]
pub struct MeasuredPair {
    pub domain: usize,
    pub one: i32,
    pub other: i32,
    pub link: u32,
}

/// Destinations, by their places in the order, that one link leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub start: u32,
    pub end: u32,
    /// Which link; 0 is that of places that share nothing.
    pub link: u32,
    /// Links of one kind are as fast as each other, but for those that have a pace of their own.
    pub kind: u32,
    /// Transfers of one number share their link.
    pub shared: u64,
}

/// What transfers have in common that share a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedName {
    pub source: Source,
    /// The destination's value of the source's last domain.
    pub dst: i32,
}

/// Domains with the ids of the source's values, from the broadest level down to the one that decides.
pub type Source = Vec<(usize, i32)>;

/// What is to travel over one link.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub bytes: f64,
    pub count: f64,
}

impl Load {
    /// The bytes that a transfer shares its link with while it lasts, when bandwidth is shared evenly.
    #[inline(always)]
    pub fn sharing(self, bytes: f64) -> f64 {
        let most = self.count * bytes;
        if self.bytes < most {
            self.bytes
        } else {
            most
        }
    }
}

/// How a link differs from its figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// How many times as long bytes take.
    pub slowness: f64,
    /// How much longer each transfer takes.
    pub extra_s: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { slowness: 1.0, extra_s: 0.0 }
    }
}

struct Row {
    runs: Arc<[Run]>,
    /// The same without what is shared: fewer, for a place whose links have nothing of their own.
    bare_runs: Arc<[Run]>,
    sources: Vec<u32>,
}

/// The links between all slots of a fleet while nobody moves, their loads and paces.
pub struct LinkMap {
    /// By domain, the ids of its values by slot.
    domains: Vec<Vec<i32>>,
    /// By slot, which of the orders of levels its worker has.
    order_at: Vec<usize>,
    orders: Vec<Vec<Level>>,
    pairs: Vec<MeasuredPair>,
    destinations: Arc<[u32]>,
    place_at: Vec<Option<u32>>,
    places: HashMap<(usize, Vec<i32>), u32>,
    rows: Vec<Row>,
    sources: Vec<Source>,
    source_at: HashMap<Source, u32>,
    /// By source, how many loads and paces of its own the links from there have.
    n_own: Vec<u32>,
    loads: HashMap<u64, Load>,
    paces: HashMap<u64, Pace>,
    kind_paces: Vec<Pace>,
}

impl LinkMap {
    /// # Panics
    /// When columns differ in length, or something names what is not there.
    pub fn new(
        domains: Vec<Vec<i32>>,
        order_at: Vec<usize>,
        orders: Vec<Vec<Level>>,
        pairs: Vec<MeasuredPair>,
        mut destinations: Vec<u32>,
    ) -> Self {
        let n_slots = order_at.len();
        let n_kinds = 1 + 2 * domains.len();
        assert!(domains.iter().all(|ids| ids.len() == n_slots));
        destinations
            .sort_by_cached_key(|&slot| domains.iter().map(|ids| ids[slot as usize]).collect::<Vec<_>>());
        LinkMap {
            domains,
            order_at,
            orders,
            pairs,
            destinations: destinations.into(),
            place_at: vec![None; n_slots],
            places: HashMap::new(),
            rows: Vec::new(),
            // The first one is that of ALONE.
            sources: vec![Source::new()],
            source_at: HashMap::new(),
            n_own: vec![0],
            loads: HashMap::new(),
            paces: HashMap::new(),
            kind_paces: vec![Pace::default(); n_kinds],
        }
    }

    pub fn n_slots(&self) -> usize {
        self.order_at.len()
    }

    pub fn n_domains(&self) -> usize {
        self.domains.len()
    }

    /// The slots that KV may be sent to, in their order.
    pub fn destinations(&self) -> &Arc<[u32]> {
        &self.destinations
    }

    /// Where in the order the destinations with this value of a domain are.
    pub fn spans(&self, domain: usize, value: i32) -> Vec<(u32, u32)> {
        let mut spans: Vec<(u32, u32)> = Vec::new();
        for (at, &slot) in (0u32..).zip(self.destinations.iter()) {
            if self.domains[domain][slot as usize] == value {
                match spans.last_mut() {
                    Some(last) if last.1 == at => last.1 += 1,
                    _ => spans.push((at, at + 1)),
                }
            }
        }
        spans
    }

    /// The runs of links from a place; without what is shared where no link from there has anything of its own.
    pub fn runs(&self, place: u32) -> &Arc<[Run]> {
        let row = &self.rows[place as usize];
        if row.sources.iter().any(|&source| self.n_own[source as usize] > 0) {
            &row.runs
        } else {
            &row.bare_runs
        }
    }

    /// The number of a slot's place; slots of one number have the same links.
    ///
    /// # Panics
    /// When there is no such slot.
    pub fn place(&mut self, src: usize) -> u32 {
        if let Some(place) = self.place_at[src] {
            return place;
        }
        let order = self.order_at[src];
        let of_levels = self.orders[order].iter().map(|level| level.domain);
        let of_pairs = self.pairs.iter().map(|pair| pair.domain);
        let key =
            (order, of_levels.chain(of_pairs).map(|domain| self.domains[domain][src]).collect::<Vec<_>>());
        let place = match self.places.get(&key) {
            Some(&place) => place,
            None => {
                let row = self.row(src);
                self.rows.push(row);
                let place = self.rows.len() as u32 - 1;
                self.places.insert(key, place);
                place
            }
        };
        self.place_at[src] = Some(place);
        place
    }

    /// Which link leads from one slot to another, and its number among what is shared.
    pub fn link(&mut self, src: usize, dst: usize) -> (u32, u64) {
        let from = self.from(src);
        self.find(dst, &from)
    }

    /// What the transfers of a number share; None for those that share nothing.
    pub fn name(&self, shared: u64) -> Option<SharedName> {
        let source = self.sources.get((shared >> 32) as usize).filter(|_| shared != ALONE)?;
        Some(SharedName { source: source.clone(), dst: shared as u32 as i32 })
    }

    /// The number of what has a name.
    pub fn number(&mut self, name: &SharedName) -> u64 {
        let source = self.source(&name.source);
        numbered(source, name.dst)
    }

    /// Whether a number was given.
    pub fn is_known(&self, shared: u64) -> bool {
        ((shared >> 32) as usize) < self.sources.len()
    }

    /// Say what is to travel over a link.
    pub fn set_load(&mut self, shared: u64, load: Load) {
        if shared == ALONE {
            return;
        }
        let n_own = &mut self.n_own[(shared >> 32) as usize];
        if load.count > 0.0 {
            *n_own += u32::from(self.loads.insert(shared, load).is_none());
        } else {
            *n_own -= u32::from(self.loads.remove(&shared).is_some());
        }
    }

    /// Say how fast a link is; None: as its kind is.
    pub fn set_pace(&mut self, shared: u64, pace: Option<Pace>) {
        if shared == ALONE {
            return;
        }
        let n_own = &mut self.n_own[(shared >> 32) as usize];
        match pace {
            Some(pace) => *n_own += u32::from(self.paces.insert(shared, pace).is_none()),
            None => *n_own -= u32::from(self.paces.remove(&shared).is_some()),
        }
    }

    /// Say how fast links are that a domain decides, within one of its values or between two; without a domain, those
    /// between places of which nobody knows how they are connected.
    ///
    /// # Panics
    /// When there is no such domain.
    pub fn set_kind_pace(&mut self, domain: Option<usize>, within: bool, pace: Pace) {
        self.kind_paces[domain.map_or(0, |domain| kind(domain, within)) as usize] = pace;
    }

    /// Nothing travels over any link, and each is as its figures say.
    pub fn clear(&mut self) {
        self.loads.clear();
        self.paces.clear();
        self.n_own.fill(0);
        self.kind_paces.fill(Pace::default());
    }

    /// What is to travel over a link.
    #[inline]
    pub fn load(&self, shared: u64) -> Load {
        if shared == ALONE || self.n_own[(shared >> 32) as usize] == 0 {
            return Load::default();
        }
        self.loads.get(&shared).copied().unwrap_or_default()
    }

    /// How fast a link of a kind is.
    #[inline]
    pub fn pace(&self, shared: u64, kind: u32) -> Pace {
        let own = match shared {
            ALONE => None,
            shared if self.n_own[(shared >> 32) as usize] == 0 => None,
            shared => self.paces.get(&shared),
        };
        *own.unwrap_or(&self.kind_paces[kind as usize])
    }

    /// Which kind a link is of.
    pub fn kind_of(&self, shared: u64) -> u32 {
        match self.sources[(shared >> 32) as usize].last() {
            Some(&(domain, value)) => kind(domain, value == shared as u32 as i32),
            None => 0,
        }
    }

    fn row(&mut self, src: usize) -> Row {
        let from = self.from(src);
        let (mut runs, mut bare_runs): (Vec<Run>, Vec<Run>) = Default::default();
        for (at, &dst) in (0u32..).zip(self.destinations.iter()) {
            let (link, shared) = self.find(dst as usize, &from);
            let run = Run { start: at, end: at + 1, link, kind: self.kind_of(shared), shared };
            add_to_run(&mut runs, run);
            add_to_run(&mut bare_runs, Run { shared: ALONE, ..run });
        }
        let of_levels = from.levels.iter().map(|level| level.2);
        let sources = of_levels.chain(from.measured.iter().map(|pair| pair.3)).collect();
        Row { runs: runs.into(), bare_runs: bare_runs.into(), sources }
    }

    fn from(&mut self, src: usize) -> From {
        let mut values = Vec::new();
        let mut levels = Vec::new();
        for level in self.orders[self.order_at[src]].clone() {
            let own = self.domains[level.domain][src];
            values.push((level.domain, own));
            let source = self.source(&values);
            levels.push((level, own, source));
        }
        let mut measured = Vec::new();
        for pair in self.pairs.clone() {
            let here = self.domains[pair.domain][src];
            for (near, far) in [(pair.one, pair.other), (pair.other, pair.one)] {
                if here != UNKNOWN && here == near {
                    measured.push((pair.domain, far, pair.link, self.source(&[(pair.domain, here)])));
                }
            }
        }
        From { levels, measured }
    }

    fn source(&mut self, source: &[(usize, i32)]) -> u32 {
        if let Some(&at) = self.source_at.get(source) {
            return at;
        }
        let at = self.sources.len() as u32;
        self.sources.push(source.to_vec());
        self.n_own.push(0);
        self.source_at.insert(source.to_vec(), at);
        at
    }

    fn find(&self, dst: usize, from: &From) -> (u32, u64) {
        for &(domain, far, link, source) in &from.measured {
            if self.domains[domain][dst] == far {
                return (link, numbered(source, far));
            }
        }
        let (mut decides, mut link, mut shared) = (None, 0, ALONE);
        let mut is_open = true;
        for &(level, own, source) in &from.levels {
            decides = level.link.map(|link| (link, level.domain, source)).or(decides);
            let value = self.domains[level.domain][dst];
            if own == UNKNOWN || value == UNKNOWN {
                continue;
            }
            if value != own {
                if is_open {
                    shared = numbered(source, value);
                }
                break;
            }
            if let Some((its_link, domain, its_source)) = decides {
                link = its_link;
                shared = numbered(its_source, self.domains[domain][dst]);
                is_open = false;
            } else {
                shared = numbered(source, own);
            }
        }
        (link, shared)
    }
}

/// Where KV comes from: levels with the own value and the number of the source down to there; measured pairs with the
/// far value, the link and the source.
struct From {
    levels: Vec<(Level, i32, u32)>,
    measured: Vec<(usize, i32, u32, u32)>,
}

fn numbered(source: u32, dst: i32) -> u64 {
    u64::from(source) << 32 | u64::from(dst as u32)
}

fn kind(domain: usize, within: bool) -> u32 {
    1 + 2 * domain as u32 + u32::from(within)
}

fn add_to_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if (last.link, last.kind, last.shared) == (run.link, run.kind, run.shared) => {
            last.end = run.end;
        }
        _ => runs.push(run),
    }
}
