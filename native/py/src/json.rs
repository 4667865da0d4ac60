//! `JsonBounds` and `token_ids`: scan JSON, and read its token ids, without Python objects.

use kvrouter_core::json::{self, Fault, Refused};
use kvrouter_core::token_ids::parsed as parsed_token_ids;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

pyo3::import_exception!(kvrouter.core.json_bounds, JsonRefused);

/// From this size on a scan takes longer than giving the interpreter up and waiting to get it back.
pub const DETACHED_BYTES: usize = 64 * 1024;

#[pyclass(frozen, module = "kvrouter._native")]
pub struct JsonBounds(json::Limits);

#[pymethods]
impl JsonBounds {
    #[new]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (*, depth, values, items, numbers, text_bytes, short_bytes, key_bytes, number_bytes, blanks_in_row, blanks, number_fields, short_fields, containers=usize::MAX, read_fields=None, read_depth=usize::MAX, takes_nan=false))]
    fn new(
        depth: usize,
        values: usize,
        items: usize,
        numbers: usize,
        text_bytes: usize,
        short_bytes: usize,
        key_bytes: usize,
        number_bytes: usize,
        blanks_in_row: usize,
        blanks: usize,
        number_fields: Vec<String>,
        short_fields: Vec<String>,
        containers: usize,
        read_fields: Option<Vec<(String, bool)>>,
        read_depth: usize,
        takes_nan: bool,
    ) -> Self {
        JsonBounds(json::Limits {
            depth,
            values,
            items,
            containers,
            numbers,
            text_bytes,
            short_bytes,
            key_bytes,
            number_bytes,
            blanks_in_row,
            blanks,
            number_fields: number_fields.into_iter().map(String::into_bytes).collect(),
            short_fields: short_fields.into_iter().map(String::into_bytes).collect(),
            read_fields: read_fields.map(|fields| {
                let read =
                    |(name, is_free): (String, bool)| json::ReadField { name: name.into_bytes(), is_free };
                fields.into_iter().map(read).collect()
            }),
            read_depth,
            takes_nan,
        })
    }

    /// The fields of the outermost object (begin, end, characters and bytes of the strings), by their names,
    /// and how many values there are.
    fn scan<'py>(&self, py: Python<'py>, text: &[u8]) -> PyResult<(Bound<'py, PyDict>, usize)> {
        let found = if text.len() < DETACHED_BYTES {
            json::scan(text, &self.0)
        } else {
            py.detach(|| json::scan(text, &self.0))
        };
        let found = found.map_err(|refused| refusal(&refused))?;
        let fields = PyDict::new(py);
        for json::Field { key, value, strings } in found.fields {
            let name = PyString::new(py, std::str::from_utf8(&text[key]).expect("checked by the scan"));
            fields.set_item(name, (value.start, value.end, strings.chars, strings.bytes))?;
        }
        Ok((fields, found.values))
    }
}

/// The token ids of the JSON list that begins at `begin`, packed, and where it ends.
#[pyfunction]
pub fn token_ids<'py>(py: Python<'py>, text: &[u8], begin: usize) -> PyResult<(Bound<'py, PyBytes>, usize)> {
    let list = text.get(begin..).unwrap_or(&[]);
    let found = if list.len() < DETACHED_BYTES {
        parsed_token_ids(list)
    } else {
        py.detach(|| parsed_token_ids(list))
    };
    let found = found.map_err(|refused| {
        let path = format!("[{}]", refused.index);
        JsonRefused::new_err(("token_id", path, begin + refused.at, "is no token id"))
    })?;
    let packed = PyBytes::new_with(py, 4 * found.ids.len(), |packed| {
        for (place, id) in packed.chunks_exact_mut(4).zip(&found.ids) {
            place.copy_from_slice(&id.to_ne_bytes());
        }
        Ok(())
    })?;
    Ok((packed, begin + found.end))
}

fn refusal(refused: &Refused) -> PyErr {
    let (kind, what) = match refused.fault {
        Fault::Syntax(what) => ("syntax", what),
        Fault::NotFinite => ("not_finite", ""),
        Fault::Depth => ("depth", ""),
        Fault::Values => ("values", ""),
        Fault::Items => ("items", ""),
        Fault::Containers => ("containers", ""),
        Fault::Numbers => ("numbers", ""),
        Fault::TextBytes => ("text_bytes", ""),
        Fault::ShortBytes => ("short_bytes", ""),
        Fault::KeyBytes => ("key_bytes", ""),
        Fault::NumberBytes => ("number_bytes", ""),
        Fault::Blanks => ("blanks", ""),
    };
    JsonRefused::new_err((kind, refused.path.clone(), refused.at, what))
}
