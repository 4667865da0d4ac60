//! The text of a log event. Every request ends with one, of some thirty fields.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyString};

#[pyfunction]
#[pyo3(signature = (event, fields, plain_max, quote, /))]
pub fn event_text(
    event: &str,
    fields: &Bound<'_, PyDict>,
    plain_max: usize,
    quote: &Bound<'_, PyAny>,
) -> PyResult<String> {
    let mut text = String::with_capacity(1024);
    text.push_str(event);
    for (key, value) in fields {
        text.push(' ');
        text.push_str(key.cast::<PyString>()?.to_str()?);
        text.push('=');
        if value.is_none() {
            text.push('-');
        } else if let Ok(is_so) = value.cast::<PyBool>() {
            text.push_str(if is_so.is_true() { "true" } else { "false" });
        } else if let Ok(number) = value.cast::<PyFloat>() {
            push_float(&mut text, number.value());
        } else {
            let shown = value.str()?;
            match shown.to_str() {
                Ok(plain) if plain.len() <= plain_max && is_plain(plain) => text.push_str(plain),
                _ => text.push_str(quote.call1((shown,))?.cast::<PyString>()?.to_str()?),
            }
        }
    }
    Ok(text)
}

/// Whether a text needs no quotes: it is printable ASCII without spaces, quotes and backslashes.
fn is_plain(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\'' | b'\\');
    !text.is_empty() && text.bytes().all(is_plain)
}

/// Append a number to six significant digits, as `%.6g` does.
fn push_float(text: &mut String, number: f64) {
    if !number.is_finite() {
        let sign = if number == f64::NEG_INFINITY { "-" } else { "" };
        let name = if number.is_nan() { "nan" } else { "inf" };
        text.extend([sign, name]);
        return;
    }
    let scientific = format!("{number:.5e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if (-4..6).contains(&exponent) {
        text.push_str(without_zeros(&format!("{number:.*}", (5 - exponent) as usize)));
    } else {
        text.push_str(without_zeros(mantissa));
        let sign = if exponent < 0 { '-' } else { '+' };
        text.push_str(&format!("e{sign}{:02}", exponent.abs()));
    }
}

fn without_zeros(number: &str) -> &str {
    if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    }
}
