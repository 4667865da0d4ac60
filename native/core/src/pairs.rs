//! The least that each prefill slot and any decode slot it may send its KV to cost together;
//! `kvrouter.kernel.routing.joint` has the formula.

use std::collections::HashMap;
use std::sync::Arc;

use crate::links::{LinkMap, Run};
use crate::prediction::Prediction;

/// What KV over one link costs.
#[derive(Clone, Copy)]
pub struct LinkCost {
    pub latency_s: f64,
    pub s_per_byte: f64,
    /// What a byte's price weighs, in seconds.
    pub price_s_per_byte: f64,
}

/// What a prefill worker asks of where its KV goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    Anywhere,
    Required,
    /// Within its domain while somebody there may take it.
    Fallback,
    /// Anywhere; its domain is cheaper.
    Preferred,
}

struct Limit {
    rule: Rule,
    /// Where its domain's destinations are in the map's order.
    spans: Vec<(u32, u32)>,
}

/// Prefill slots whose KV the same decode slots can take.
struct Group {
    slots: Vec<u32>,
    /// In the map's order, who can.
    takes: Vec<bool>,
}

/// The prefill slots of a fleet: what each asks of its decode slot, its bytes a token, and who can take its KV.
pub struct Senders {
    limits: Vec<Limit>,
    limit_of: Vec<u32>,
    kv_bytes_per_token: Vec<f64>,
    /// Empty when everybody can take all KV.
    groups: Vec<Group>,
}

impl Senders {
    /// `limits` are rules with the domain and its value, None where it is not known; `limit_of` and
    /// `kv_bytes_per_token` have an entry for each slot; `groups` are prefill slots and who can take their KV, none
    /// when everybody can take all KV.
    ///
    /// # Panics
    /// When columns do not have the map's length, or name what is not there.
    pub fn new(
        map: &LinkMap,
        limits: &[(Rule, Option<(usize, i32)>)],
        limit_of: Vec<u32>,
        kv_bytes_per_token: Vec<f64>,
        groups: Vec<(Vec<u32>, Vec<u32>)>,
    ) -> Self {
        assert!(limit_of.len() == map.n_slots() && kv_bytes_per_token.len() == map.n_slots());
        assert!(limit_of.iter().all(|&limit| (limit as usize) < limits.len()));
        let limits = limits
            .iter()
            .map(|&(rule, place)| Limit {
                rule,
                spans: place.map_or(Vec::new(), |(domain, value)| map.spans(domain, value)),
            })
            .collect();
        let groups = groups
            .into_iter()
            .map(|(slots, takers)| {
                let mut takes = vec![false; map.n_slots()];
                takers.iter().for_each(|&slot| takes[slot as usize] = true);
                Group { slots, takes: map.destinations().iter().map(|&slot| takes[slot as usize]).collect() }
            })
            .collect();
        Senders { limits, limit_of, kv_bytes_per_token, groups }
    }

    pub fn n_limits(&self) -> usize {
        self.limits.len()
    }
}

/// One request's choice. Columns have an entry for each slot.
pub struct Choice<'a> {
    pub prefill: Prediction<'a>,
    pub decode: Prediction<'a>,
    pub links: &'a [LinkCost],
    pub prefill_multiplier: Option<&'a [f64]>,
    pub decode_multiplier: Option<&'a [f64]>,
    /// By limit, the decode multiplier within its domain, where that is preferred.
    pub near_multipliers: Vec<Option<&'a [f64]>>,
}

impl Choice<'_> {
    /// Fills `out` with the least cost of a pair for each slot of `senders`, whose decode slot is one of `receivers`;
    /// infinity where there is none.
    ///
    /// # Panics
    /// When a column is shorter than the map's, or a limit that prefers has no multiplier.
    pub fn least(&self, map: &mut LinkMap, of: &Senders, senders: &[u8], receivers: &[u8], out: &mut [f64]) {
        out.fill(f64::INFINITY);
        let order = Arc::clone(map.destinations());
        let mut slots = Receivers::new(self, &order, receivers);
        if of.groups.is_empty() {
            self.least_among(map, of, &slots, (0..map.n_slots()).filter(|&slot| senders[slot] != 0), out);
            return;
        }
        let rest_s = slots.rest_s.clone();
        for group in &of.groups {
            for ((here, &whole), &takes) in slots.rest_s.iter_mut().zip(&rest_s).zip(&group.takes) {
                *here = if takes { whole } else { f64::INFINITY };
            }
            let own = group.slots.iter().map(|&slot| slot as usize).filter(|&slot| senders[slot] != 0);
            self.least_among(map, of, &slots, own, out);
        }
    }

    /// Fills `out` for each of `senders`.
    fn least_among(
        &self,
        map: &mut LinkMap,
        of: &Senders,
        slots: &Receivers<'_>,
        senders: impl Iterator<Item = usize>,
        out: &mut [f64],
    ) {
        let mut search = Search { of, slots, is_home: vec![None; of.limits.len()], near: HashMap::new() };
        let mut known: HashMap<(u32, u32, u64), f64> = HashMap::new();
        for slot in senders {
            let (cost_s, own_s) = self.prefill.prefill_leg(slot);
            let sender =
                Sender { limit: of.limit_of[slot], kv_bytes_per_token: of.kv_bytes_per_token[slot], own_s };
            let place = map.place(slot);
            let key = (place, sender.limit, sender.kv_bytes_per_token.to_bits());
            // Where there is memory everywhere, how long the prompt takes changes nothing of what follows it.
            let is_known = !slots.any_waits;
            let rest_s = match known.get(&key).filter(|_| is_known) {
                Some(&rest_s) => rest_s,
                None => {
                    let rest_s = search.least(self, map, map.runs(place), sender);
                    known.insert(key, rest_s);
                    rest_s
                }
            };
            out[slot] = self.prefill_multiplier.map_or(1.0, |column| column[slot]) * cost_s + rest_s;
        }
    }

    /// Fills `out` with what each decode slot adds to the cost of one prefill slot; infinity where KV is never sent.
    ///
    /// # Panics
    /// When a column is shorter than the map's.
    pub fn of_sender(&self, map: &mut LinkMap, of: &Senders, sender: usize, out: &mut [f64]) {
        out.fill(f64::INFINITY);
        let (_, own_s) = self.prefill.prefill_leg(sender);
        let place = map.place(sender);
        let kv_bytes_per_token = of.kv_bytes_per_token[sender];
        for run in map.runs(place).iter() {
            let link = Way::new(map, self.links, run, kv_bytes_per_token);
            for &slot in &map.destinations()[run.start as usize..run.end as usize] {
                let slot = slot as usize;
                let (rest_s, memory_s) = self.decode.decode_leg(slot);
                let tokens = self.decode.missing_tokens(slot);
                let multiplier = self.decode_multiplier.map_or(1.0, |column| column[slot]);
                out[slot] = link.after(own_s, rest_s, memory_s, tokens) * multiplier;
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Sender {
    limit: u32,
    kv_bytes_per_token: f64,
    own_s: f64,
}

/// A link as one sender's KV uses it, by the token.
#[derive(Clone, Copy)]
struct Way {
    latency_s: f64,
    token_s: f64,
    /// What all others take there, and what of it a token waits for at most.
    others_s: f64,
    token_others_s: f64,
}

impl Way {
    fn new(map: &LinkMap, links: &[LinkCost], run: &Run, kv_bytes_per_token: f64) -> Self {
        let (link, pace, load) =
            (links[run.link as usize], map.pace(run.shared, run.kind), map.load(run.shared));
        let s_per_byte = link.s_per_byte * pace.slowness;
        Way {
            latency_s: link.latency_s + pace.extra_s,
            token_s: (s_per_byte + link.price_s_per_byte) * kv_bytes_per_token,
            others_s: load.bytes * s_per_byte,
            token_others_s: load.count * s_per_byte * kv_bytes_per_token,
        }
    }

    fn is_shared(&self) -> bool {
        self.others_s > 0.0
    }

    /// What follows the prompt's own time at one decode slot.
    #[inline(always)]
    fn after(&self, own_s: f64, rest_s: f64, memory_s: f64, tokens: f64) -> f64 {
        self.passed::<true, true>(own_s, rest_s, memory_s, tokens)
    }

    /// The same where nobody waits for memory, or nothing else travels there.
    #[inline(always)]
    fn passed<const WAITS: bool, const SHARED: bool>(
        &self,
        own_s: f64,
        rest_s: f64,
        memory_s: f64,
        tokens: f64,
    ) -> f64 {
        let mut after_s = rest_s + (self.latency_s + tokens * self.token_s);
        if WAITS {
            let waits_s = memory_s - own_s;
            after_s += if waits_s > 0.0 { waits_s } else { 0.0 };
        }
        if SHARED {
            let most_s = tokens * self.token_others_s;
            after_s += if most_s < self.others_s { most_s } else { self.others_s };
        }
        after_s
    }
}

/// The destinations of a map, in its order.
struct Receivers<'a> {
    order: &'a [u32],
    /// Infinite for those that may not take the request.
    rest_s: Vec<f64>,
    memory_s: Vec<f64>,
    tokens: Vec<f64>,
    multiplier: Option<Vec<f64>>,
    any_waits: bool,
}

impl<'a> Receivers<'a> {
    fn new(choice: &Choice<'_>, order: &'a [u32], receivers: &[u8]) -> Self {
        let n = order.len();
        let (mut rest_s, mut memory_s, mut tokens) = (vec![f64::INFINITY; n], vec![0.0; n], vec![0.0; n]);
        let mut any_waits = false;
        for (at, &slot) in order.iter().enumerate() {
            let slot = slot as usize;
            if receivers[slot] != 0 {
                (rest_s[at], memory_s[at]) = choice.decode.decode_leg(slot);
                tokens[at] = choice.decode.missing_tokens(slot);
                any_waits |= memory_s[at] > 0.0;
            }
        }
        let multiplier = choice.decode_multiplier.map(|column| gathered(column, order));
        Receivers { order, rest_s, memory_s, tokens, multiplier, any_waits }
    }

    fn any_in(&self, spans: &[(u32, u32)]) -> bool {
        spans.iter().any(|&(start, end)| {
            self.rest_s[start as usize..end as usize].iter().any(|&rest_s| rest_s < f64::INFINITY)
        })
    }

    fn least(&self, start: u32, end: u32, way: Way, own_s: f64, multiplier: Option<&[f64]>) -> f64 {
        let range = start as usize..end as usize;
        let columns =
            [&self.rest_s[range.clone()], &self.memory_s[range.clone()], &self.tokens[range.clone()]];
        let multiplier = multiplier.map_or(&[][..], |column| &column[range]);
        match (self.any_waits, way.is_shared(), multiplier.is_empty()) {
            (false, false, true) => least_of::<false, false, false>(columns, multiplier, way, own_s),
            (false, false, false) => least_of::<false, false, true>(columns, multiplier, way, own_s),
            (false, true, true) => least_of::<false, true, false>(columns, multiplier, way, own_s),
            (false, true, false) => least_of::<false, true, true>(columns, multiplier, way, own_s),
            (true, false, true) => least_of::<true, false, false>(columns, multiplier, way, own_s),
            (true, false, false) => least_of::<true, false, true>(columns, multiplier, way, own_s),
            (true, true, true) => least_of::<true, true, false>(columns, multiplier, way, own_s),
            (true, true, false) => least_of::<true, true, true>(columns, multiplier, way, own_s),
        }
    }
}

const LANES: usize = 4;

/// The loop over all pairs: lanes of their own, so that the compiler makes vectors of them.
#[inline(always)]
fn least_of<const WAITS: bool, const SHARED: bool, const MULTIPLIED: bool>(
    [rest_s, memory_s, tokens]: [&[f64]; 3],
    multiplier: &[f64],
    way: Way,
    own_s: f64,
) -> f64 {
    let n = rest_s.len();
    let (memory_s, tokens) = (&memory_s[..n], &tokens[..n]);
    let cost = |at: usize| {
        let after = way.passed::<WAITS, SHARED>(own_s, rest_s[at], memory_s[at], tokens[at]);
        if MULTIPLIED {
            after * multiplier[at]
        } else {
            after
        }
    };
    let mut least = [f64::INFINITY; LANES];
    let whole = n - n % LANES;
    for at in (0..whole).step_by(LANES) {
        for (lane, least) in least.iter_mut().enumerate() {
            let cost = cost(at + lane);
            *least = if cost < *least { cost } else { *least };
        }
    }
    for at in whole..n {
        least[0] = least[0].min(cost(at));
    }
    least.into_iter().fold(f64::INFINITY, f64::min)
}

fn gathered(column: &[f64], order: &[u32]) -> Vec<f64> {
    order.iter().map(|&slot| column[slot as usize]).collect()
}

struct Search<'a> {
    of: &'a Senders,
    slots: &'a Receivers<'a>,
    /// By limit, whether somebody of its domain may take the request, once that was asked.
    is_home: Vec<Option<bool>>,
    near: HashMap<*const f64, Vec<f64>>,
}

impl Search<'_> {
    fn least(&mut self, choice: &Choice<'_>, map: &LinkMap, runs: &[Run], sender: Sender) -> f64 {
        let (at, slots) = (sender.limit as usize, self.slots);
        let limit = &self.of.limits[at];
        let everywhere = [(0, slots.order.len() as u32)];
        let elsewhere = slots.multiplier.as_deref();
        let within = |spans: &[(u32, u32)], multiplier: Option<&[f64]>| {
            let mut least = f64::INFINITY;
            for &(start, end) in spans {
                let first = runs.partition_point(|run| run.end <= start);
                for run in runs[first..].iter().take_while(|run| run.start < end) {
                    let way = Way::new(map, choice.links, run, sender.kv_bytes_per_token);
                    let found =
                        slots.least(run.start.max(start), run.end.min(end), way, sender.own_s, multiplier);
                    least = least.min(found);
                }
            }
            least
        };
        match limit.rule {
            Rule::Anywhere => within(&everywhere, elsewhere),
            Rule::Required => within(&limit.spans, elsewhere),
            Rule::Fallback => {
                let is_home = *self.is_home[at].get_or_insert_with(|| slots.any_in(&limit.spans));
                within(if is_home { &limit.spans } else { &everywhere }, elsewhere)
            }
            Rule::Preferred => {
                let column = choice.near_multipliers[at].expect("a multiplier where a domain is preferred");
                let near = self.near.entry(column.as_ptr()).or_insert_with(|| gathered(column, slots.order));
                let outside = gaps(&limit.spans, slots.order.len() as u32);
                within(&limit.spans, Some(near)).min(within(&outside, elsewhere))
            }
        }
    }
}

/// What lies between spans.
fn gaps(spans: &[(u32, u32)], end: u32) -> Vec<(u32, u32)> {
    let starts = std::iter::once(0).chain(spans.iter().map(|span| span.1));
    let ends = spans.iter().map(|span| span.0).chain(std::iter::once(end));
    starts.zip(ends).filter(|(start, end)| start < end).collect()
}
