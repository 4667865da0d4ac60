//! `LinkMap` and `Senders`: the links between slots, and the choice of a pair over them.

use kvrouter_core::links::{Level, LinkMap as Map, Load, MeasuredPair, Pace, SharedName, Source};
use kvrouter_core::pairs::{Choice, LinkCost, Rule, Senders as CoreSenders};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyBufferError, PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::prediction::{AskedArgs, Columns, Flag, Predictor, RankColumns};

#[derive(Clone, Copy)]
struct Figures {
    latency_s: f64,
    bytes_per_s: f64,
    price_per_byte: f64,
}

#[pyclass(module = "kvrouter._native")]
pub struct LinkMap {
    map: Map,
    links: Vec<Figures>,
}

/// By level: the domain, and which link its own is.
type OrderArgs = Vec<(usize, Option<u32>)>;

/// A measured pair: domain, one value, the other, which link.
type PairArgs = (usize, i32, i32, u32);

#[pymethods]
impl LinkMap {
    #[new]
    fn new(
        domains: Vec<Bound<'_, PyAny>>,
        order_at: Vec<usize>,
        orders: Vec<OrderArgs>,
        pairs: Vec<PairArgs>,
        destinations: Vec<u32>,
        links: Vec<[f64; 3]>,
    ) -> PyResult<Self> {
        let (n_slots, n_domains, n_links) = (order_at.len(), domains.len(), links.len() as u32);
        let is_there = |domain: usize, link: u32| domain < n_domains && link < n_links;
        if order_at.iter().any(|&order| order >= orders.len())
            || orders.iter().flatten().any(|&(domain, link)| !is_there(domain, link.unwrap_or(0)))
            || pairs.iter().any(|&(domain, _, _, link)| !is_there(domain, link))
            || destinations.iter().any(|&slot| slot as usize >= n_slots)
            || links.is_empty()
        {
            return Err(PyValueError::new_err(
                "links: an order, a domain, a link or a slot that is not there",
            ));
        }
        let columns = domains
            .iter()
            .map(|column| {
                let column = Columns::<i32>::get("domains", column, n_slots)?;
                Ok(column.as_slice(domains[0].py())[..n_slots].to_vec())
            })
            .collect::<PyResult<Vec<_>>>()?;
        let orders = orders
            .into_iter()
            .map(|order| order.into_iter().map(|(domain, link)| Level { domain, link }).collect())
            .collect();
        let pairs = pairs
            .into_iter()
            .map(|(domain, one, other, link)| MeasuredPair { domain, one, other, link })
            .collect();
        Ok(LinkMap { map: Map::new(columns, order_at, orders, pairs, destinations), links: figures(links) })
    }

    /// Which link leads from one slot to another, and its number among what is shared.
    fn link(&mut self, src: usize, dst: usize) -> PyResult<(u32, u64)> {
        self.check_slot(src)?;
        self.check_slot(dst)?;
        Ok(self.map.link(src, dst))
    }

    /// What the transfers of a number share.
    fn name(&self, shared: u64) -> Option<(Source, i32)> {
        self.map.name(shared).map(|name| (name.source, name.dst))
    }

    /// The number of what has a name.
    fn number(&mut self, source: Source, dst: i32) -> u64 {
        self.map.number(&SharedName { source, dst })
    }

    /// Say what is to travel over a link.
    fn set_load(&mut self, shared: u64, kv_bytes: f64, count: f64) -> PyResult<()> {
        self.check_number(shared)?;
        self.map.set_load(shared, Load { bytes: kv_bytes, count });
        Ok(())
    }

    /// The link from one slot to another: which one, bytes and transfers that are to travel there, its slowness, and
    /// what each transfer takes more.
    fn state(&mut self, src: usize, dst: usize) -> PyResult<(u32, f64, f64, f64, f64)> {
        self.check_slot(src)?;
        self.check_slot(dst)?;
        let (link, shared) = self.map.link(src, dst);
        let (load, pace) = (self.map.load(shared), self.map.pace(shared, self.map.kind_of(shared)));
        Ok((link, load.bytes, load.count, pace.slowness, pace.extra_s))
    }

    /// Say how fast a link is: how many times as long bytes take, and what each transfer takes more; None: as its kind.
    fn set_pace(&mut self, shared: u64, pace: Option<(f64, f64)>) -> PyResult<()> {
        self.check_number(shared)?;
        self.map.set_pace(shared, pace.map(|(slowness, extra_s)| Pace { slowness, extra_s }));
        Ok(())
    }

    /// Say how fast the links of a kind are.
    fn set_kind_pace(
        &mut self,
        domain: Option<usize>,
        within: bool,
        pace: Option<(f64, f64)>,
    ) -> PyResult<()> {
        if domain.is_some_and(|domain| domain >= self.map.n_domains()) {
            return Err(PyIndexError::new_err("domain: there is no such one"));
        }
        let pace = pace.map_or(Pace::default(), |(slowness, extra_s)| Pace { slowness, extra_s });
        self.map.set_kind_pace(domain, within, pace);
        Ok(())
    }

    /// Nothing travels over any link, and each is as its figures say.
    fn clear(&mut self) {
        self.map.clear();
    }

    /// Fills `out` with the seconds of a transfer to each destination, and with 0 elsewhere.
    fn transfer_seconds(
        &mut self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        src: usize,
        overlap: Option<Bound<'_, PyAny>>,
        asked: [f64; 3],
    ) -> PyResult<()> {
        self.check_slot(src)?;
        let [isl_tokens, block_size, kv_bytes_per_token] = asked;
        let overlap = Columns::<u32>::maybe("overlap", overlap.as_ref(), self.map.n_slots())?;
        let overlap = overlap.as_ref().map(|column| column.as_slice(py));
        let mut out = Written::get(out, self.map.n_slots())?;
        let out = out.as_slice(py);
        out.fill(0.0);
        let place = self.map.place(src);
        for run in self.map.runs(place).iter() {
            let link = self.links[run.link as usize];
            let (load, pace) = (self.map.load(run.shared), self.map.pace(run.shared, run.kind));
            let latency_s = link.latency_s + pace.extra_s;
            for &slot in &self.map.destinations()[run.start as usize..run.end as usize] {
                let slot = slot as usize;
                let cached = overlap.map_or(0.0, |column| f64::from(column[slot]) * block_size);
                let kv_bytes = (isl_tokens - cached).max(0.0) * kv_bytes_per_token;
                let alone_s = (kv_bytes + load.sharing(kv_bytes)) / link.bytes_per_s;
                out[slot] = latency_s + alone_s * pace.slowness;
            }
        }
        Ok(())
    }

    /// Fills `out` with what a byte to each destination costs, and with 0 elsewhere.
    fn prices(&mut self, py: Python<'_>, out: &Bound<'_, PyAny>, src: usize) -> PyResult<()> {
        self.check_slot(src)?;
        let mut out = Written::get(out, self.map.n_slots())?;
        let out = out.as_slice(py);
        out.fill(0.0);
        let place = self.map.place(src);
        for run in self.map.runs(place).iter() {
            for &slot in &self.map.destinations()[run.start as usize..run.end as usize] {
                out[slot as usize] = self.links[run.link as usize].price_per_byte;
            }
        }
        Ok(())
    }

    /// Fills `out` with the least cost of a pair for each slot of `masks[0]`, with a decode slot of `masks[1]`.
    #[allow(clippy::too_many_arguments)] // one request's choice, as Python has it
    fn least_pairs(
        &mut self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        predictor: &Predictor,
        columns: &RankColumns,
        asked: [AskedArgs; 2],
        senders: &Senders,
        masks: [Bound<'_, PyAny>; 2],
        multipliers: Multipliers<'_>,
        price_weight: f64,
    ) -> PyResult<()> {
        let n_slots = self.map.n_slots();
        senders.check(n_slots)?;
        let (prefill_multiplier, decode_multiplier, near) = multipliers;
        columns.check(n_slots)?;
        let slots = columns.slots(py);
        let [senders_mask, receivers_mask] = &masks;
        let masks = [
            Columns::<Flag>::get("senders", senders_mask, n_slots)?,
            Columns::<Flag>::get("receivers", receivers_mask, n_slots)?,
        ];
        let prefill_multiplier = Columns::maybe("multiplier", prefill_multiplier.as_ref(), n_slots)?;
        let decode_multiplier = Columns::maybe("multiplier", decode_multiplier.as_ref(), n_slots)?;
        let near = near
            .iter()
            .map(|column| Columns::maybe("multiplier", column.as_ref(), n_slots))
            .collect::<PyResult<Vec<_>>>()?;
        if near.len() != senders.senders.n_limits() || !senders.prefers(|limit| near[limit].is_some()) {
            return Err(PyValueError::new_err("near: a multiplier for each limit that prefers a domain"));
        }
        let choice = Choice {
            prefill: predictor.prediction(&slots, 0..n_slots, asked[0]),
            decode: predictor.prediction(&slots, 0..n_slots, asked[1]),
            links: &self.link_costs(price_weight),
            prefill_multiplier: prefill_multiplier.as_ref().map(|column| column.as_slice(py)),
            decode_multiplier: decode_multiplier.as_ref().map(|column| column.as_slice(py)),
            near_multipliers: near
                .iter()
                .map(|column| column.as_ref().map(|column| column.as_slice(py)))
                .collect(),
        };
        let mut out = Written::get(out, n_slots)?;
        choice.least(
            &mut self.map,
            &senders.senders,
            &masks[0].as_bytes(py)[..n_slots],
            &masks[1].as_bytes(py)[..n_slots],
            out.as_slice(py),
        );
        Ok(())
    }

    /// Fills `out` with what each decode slot adds to one prefill slot's own cost.
    #[allow(clippy::too_many_arguments)] // one request's choice, as Python has it
    fn pair_costs(
        &mut self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        predictor: &Predictor,
        columns: &RankColumns,
        asked: [AskedArgs; 2],
        senders: &Senders,
        sender: usize,
        multiplier: Option<Bound<'_, PyAny>>,
        price_weight: f64,
    ) -> PyResult<()> {
        self.check_slot(sender)?;
        let n_slots = self.map.n_slots();
        senders.check(n_slots)?;
        columns.check(n_slots)?;
        let slots = columns.slots(py);
        let multiplier = Columns::maybe("multiplier", multiplier.as_ref(), n_slots)?;
        let choice = Choice {
            prefill: predictor.prediction(&slots, 0..n_slots, asked[0]),
            decode: predictor.prediction(&slots, 0..n_slots, asked[1]),
            links: &self.link_costs(price_weight),
            prefill_multiplier: None,
            decode_multiplier: multiplier.as_ref().map(|column| column.as_slice(py)),
            near_multipliers: Vec::new(),
        };
        let mut out = Written::get(out, n_slots)?;
        choice.of_sender(&mut self.map, &senders.senders, sender, out.as_slice(py));
        Ok(())
    }
}

/// Of prefill slots, of decode slots, and by limit of decode slots in a domain that is preferred.
type Multipliers<'py> =
    (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>, Vec<Option<Bound<'py, PyAny>>>);

impl LinkMap {
    fn check_slot(&self, slot: usize) -> PyResult<()> {
        if slot >= self.map.n_slots() {
            return Err(PyIndexError::new_err(format!("slot {slot}: there are {}", self.map.n_slots())));
        }
        Ok(())
    }

    fn check_number(&self, shared: u64) -> PyResult<()> {
        if !self.map.is_known(shared) {
            return Err(PyIndexError::new_err("shared: there is no such number"));
        }
        Ok(())
    }

    fn link_costs(&self, price_weight: f64) -> Vec<LinkCost> {
        let cost = |link: &Figures| LinkCost {
            latency_s: link.latency_s,
            s_per_byte: link.bytes_per_s.recip(),
            price_s_per_byte: link.price_per_byte * price_weight,
        };
        self.links.iter().map(cost).collect()
    }
}

fn figures(links: Vec<[f64; 3]>) -> Vec<Figures> {
    let of = |[latency_s, bytes_per_s, price_per_byte]: [f64; 3]| Figures {
        latency_s,
        bytes_per_s,
        price_per_byte,
    };
    links.into_iter().map(of).collect()
}

#[pyclass(frozen, module = "kvrouter._native")]
pub struct Senders {
    senders: CoreSenders,
    prefers: Vec<bool>,
    n_slots: usize,
}

#[pymethods]
impl Senders {
    #[new]
    fn new(
        links: PyRef<'_, LinkMap>,
        limits: Vec<(String, Option<(usize, i32)>)>,
        limit_of: Vec<u32>,
        kv_bytes_per_token: Vec<f64>,
        groups: Vec<(Vec<u32>, Vec<u32>)>,
    ) -> PyResult<Self> {
        let n_slots = links.map.n_slots();
        let rule = |name: &str| match name {
            "anywhere" => Ok(Rule::Anywhere),
            "required" => Ok(Rule::Required),
            "fallback" => Ok(Rule::Fallback),
            "preferred" => Ok(Rule::Preferred),
            _ => Err(PyValueError::new_err(format!("limits: {name} is no rule"))),
        };
        let limits =
            limits.iter().map(|(name, place)| Ok((rule(name)?, *place))).collect::<PyResult<Vec<_>>>()?;
        if limit_of.len() != n_slots
            || kv_bytes_per_token.len() != n_slots
            || groups
                .iter()
                .flat_map(|(slots, takers)| slots.iter().chain(takers))
                .any(|&slot| slot as usize >= n_slots)
            || limit_of.iter().any(|&limit| limit as usize >= limits.len())
            || limits
                .iter()
                .any(|(_, place)| place.is_some_and(|(domain, _)| domain >= links.map.n_domains()))
        {
            return Err(PyValueError::new_err("senders: a limit, a domain or a slot that is not there"));
        }
        let prefers = limits.iter().map(|&(rule, _)| rule == Rule::Preferred).collect();
        let senders = CoreSenders::new(&links.map, &limits, limit_of, kv_bytes_per_token, groups);
        Ok(Senders { senders, prefers, n_slots })
    }
}

impl Senders {
    fn check(&self, n_slots: usize) -> PyResult<()> {
        if self.n_slots != n_slots {
            return Err(PyValueError::new_err("senders: made for another map"));
        }
        Ok(())
    }

    /// Whether `has` holds for every limit that prefers a domain.
    fn prefers(&self, has: impl Fn(usize) -> bool) -> bool {
        self.prefers.iter().enumerate().all(|(limit, &prefers)| !prefers || has(limit))
    }
}

/// A column of seconds that is written.
struct Written(PyBuffer<f64>);

impl Written {
    fn get(column: &Bound<'_, PyAny>, n_slots: usize) -> PyResult<Self> {
        let buffer = PyBuffer::<f64>::get(column)?;
        if buffer.readonly() || !buffer.is_c_contiguous() || buffer.item_count() != n_slots {
            return Err(PyBufferError::new_err(format!(
                "out: the buffer has to be writable and C-contiguous, with {n_slots} entries"
            )));
        }
        Ok(Written(buffer))
    }

    fn as_slice(&mut self, _attached: Python<'_>) -> &mut [f64] {
        if self.0.item_count() == 0 {
            return &mut [];
        }
        // SAFETY: contiguous, writable and kept alive by the buffer; the caller is attached, and none of the columns that
        // are read is a part of it.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast::<f64>(), self.0.item_count()) }
    }
}
