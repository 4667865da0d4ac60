//! `pick_lowest`: the slot of the lowest cost, from columns that numpy holds.

use kvrouter_core::pick::{request_bits, Costs, NoPick};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::prediction::{Columns, Flag};

#[pyfunction]
#[pyo3(signature = (cost, allowed, rank_hash, request_id, unseen, own_cost, /))]
pub fn pick_lowest(
    py: Python<'_>,
    cost: &Bound<'_, PyAny>,
    allowed: Option<&Bound<'_, PyAny>>,
    rank_hash: &Bound<'_, PyAny>,
    request_id: &Bound<'_, PyString>,
    unseen: usize,
    own_cost: f64,
) -> PyResult<usize> {
    let cost = Columns::<f64>::get("cost", cost, 0)?;
    let n_slots = cost.as_slice(py).len();
    let allowed = Columns::<Flag>::maybe("allowed", allowed, n_slots)?;
    let given =
        Costs { cost: cost.as_slice(py), allowed: allowed.as_ref().map(|column| column.as_bytes(py)) };
    let later;
    let mut costs = given;
    if unseen > 0 {
        later = given.after(unseen, own_cost).map_err(refused)?;
        costs.cost = &later;
    }
    let lowest = costs.lowest().map_err(refused)?;
    if lowest.n_equal == 1 {
        return Ok(lowest.slot);
    }
    let rank_hash = Columns::<u64>::get("rank_hash", rank_hash, n_slots)?;
    Ok(costs.spread(lowest.slot, rank_hash.as_slice(py), request_bits(request_id.to_str()?)))
}

fn refused(why: NoPick) -> PyErr {
    PyValueError::new_err(match why {
        NoPick::NotANumber(slot) => format!("cost: of slot {slot} is not a number"),
        NoPick::NoneAllowed => "allowed: no slot".to_owned(),
    })
}
