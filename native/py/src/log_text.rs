//! The text of a log event. Every request ends with one, of some thirty fields.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};
use std::fmt::Write;

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
        } else if let Some(number) = small_int(&value) {
            _ = write!(text, "{number}"); // writing to a String does not fail
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

/// The value of a plain `int` that fits; one of a subclass, such as an enumeration, may be shown as it likes.
fn small_int(value: &Bound<'_, PyAny>) -> Option<i64> {
    value.cast_exact::<PyInt>().ok()?.extract().ok()
}

/// Append a number to six significant digits, as `%.6g` does.
fn push_float(text: &mut String, number: f64) {
    if !number.is_finite() {
        let sign = if number == f64::NEG_INFINITY { "-" } else { "" };
        let name = if number.is_nan() { "nan" } else { "inf" };
        text.extend([sign, name]);
        return;
    }
    if number == 0.0 {
        text.push_str(if number.is_sign_negative() { "-0" } else { "0" });
        return;
    }
    let start = text.len();
    _ = write!(text, "{:.5e}", number.abs()); // writing to a String does not fail
    let scientific = &text[start..];
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let mut digits = [b'0'; 6];
    for (digit, byte) in digits.iter_mut().zip(mantissa.bytes().filter(u8::is_ascii_digit)) {
        *digit = byte;
    }
    text.truncate(start);
    if number < 0.0 {
        text.push('-');
    }
    let significant = digits.iter().rposition(|&digit| digit != b'0').map_or(1, |last| last + 1);
    let (whole, zeros) = match exponent {
        -4..0 => (0, -1 - exponent),
        0..6 => (exponent as usize + 1, 0),
        _ => (1, 0),
    };
    let (before, after) = digits[..significant.max(whole)].split_at(whole);
    text.extend(if whole == 0 { b"0" } else { before }.iter().copied().map(char::from));
    if !after.is_empty() {
        text.push('.');
        text.extend((0..zeros).map(|_| '0'));
        text.extend(after.iter().copied().map(char::from));
    }
    if !(-4..6).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        _ = write!(text, "e{sign}{:02}", exponent.abs());
    }
}
