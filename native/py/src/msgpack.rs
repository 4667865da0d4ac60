//! `MsgpackBounds`: counts what a frame of msgpack would become, without Python objects.

use kvrouter_core::msgpack::{self, Fault};
use pyo3::prelude::*;

use crate::json::{JsonRefused, DETACHED_BYTES};

#[pyclass(frozen, module = "kvrouter._native")]
pub struct MsgpackBounds(msgpack::Limits);

#[pymethods]
impl MsgpackBounds {
    #[new]
    #[pyo3(signature = (*, depth, values, containers))]
    fn new(depth: usize, values: usize, containers: usize) -> Self {
        MsgpackBounds(msgpack::Limits { depth, values, containers })
    }

    fn scan(&self, py: Python<'_>, frame: &[u8]) -> PyResult<()> {
        let scanned = if frame.len() < DETACHED_BYTES {
            msgpack::scan(frame, &self.0)
        } else {
            py.detach(|| msgpack::scan(frame, &self.0))
        };
        scanned.map_err(|refused| {
            let kind = match refused.fault {
                Fault::Depth => "depth",
                Fault::Values => "values",
                Fault::Containers => "containers",
            };
            JsonRefused::new_err((kind, "", refused.at, ""))
        })
    }
}
