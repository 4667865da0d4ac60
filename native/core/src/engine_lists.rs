//! The long lists of an engine's batch, read from msgpack: its events by type, and of each event the names of blocks and
//! the token ids.

use std::borrow::Cow;

use crate::msgpack::{Reader, Value};

/// What is wrong, and where: `[3]`, `[3].type`, or nothing for the list itself.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed {
    pub place: String,
    pub why: Cow<'static, str>,
}

/// An event that is not read yet: an array that begins with its type, or a map that has one.
#[derive(Debug, PartialEq, Eq)]
pub struct Event<'a> {
    pub kind: &'a str,
    pub is_array: bool,
    pub bytes: &'a [u8],
}

/// Which values a list of token ids may have besides integers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Others {
    /// Pairs of a token and the next one, in a list that begins with one; the first of a pair counts.
    Pairs,
    /// Texts, each a piece of an object; they count as token 0.
    Texts,
}

/// Token ids, and the texts among them with their places.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tokens<'a> {
    pub ids: Vec<u32>,
    pub texts: Vec<(usize, &'a str)>,
}

const TEXT_CHARS_MAX: usize = 4096;

/// The most texts of a list: a token of an object may be one, and each becomes an object of its own.
const TEXTS_MAX: usize = 1 << 18;

pub fn events(list: &[u8], max: usize) -> Result<Vec<Event<'_>>, Malformed> {
    let mut reader = Reader(list);
    let n_events = length(&mut reader, max)?;
    let mut events = Vec::with_capacity(n_events.min(list.len()));
    for at in 0..n_events {
        let refused = |place, why: &'static str| Malformed { place, why: why.into() };
        let bytes = reader.skip().ok_or_else(|| refused(String::new(), "cut short"))?;
        let (is_array, kind) =
            type_of(bytes).ok_or_else(|| refused(format!("[{at}]"), "an array or a map that has a type"))?;
        let kind = kind.ok_or_else(|| refused(format!("[{at}].type"), "a text"))?;
        events.push(Event { kind, is_array, bytes });
    }
    Ok(events)
}

/// Whether an event is an array, and its type, if that is a text; None for a value without a type.
fn type_of(event: &[u8]) -> Option<(bool, Option<&str>)> {
    let mut reader = Reader(event);
    let text = |value| match value {
        Some(Value::Text(text)) => Some(text),
        _ => None,
    };
    match reader.value()? {
        Value::Array(1..) => Some((true, text(reader.value()))),
        Value::Map(n_fields) => {
            for _ in 0..n_fields {
                if text(reader.value())? == "type" {
                    return Some((false, text(reader.value())));
                }
                reader.skip()?;
            }
            None
        }
        _ => None,
    }
}

/// The unsigned 64 bits of each hash: the low ones of an integer, the last eight bytes of bytes.
pub fn names(list: &[u8], max: usize) -> Result<Vec<u64>, Malformed> {
    let mut reader = Reader(list);
    let n_names = length(&mut reader, max)?;
    let mut names = Vec::with_capacity(n_names.min(list.len()));
    for at in 0..n_names {
        let refused = |why| Err(Malformed { place: format!("[{at}]"), why });
        names.push(match reader.value() {
            Some(Value::Unsigned(name)) => name,
            Some(Value::Negative(name)) => name as u64,
            Some(Value::Bytes(bytes)) => match bytes.last_chunk() {
                Some(last) if bytes.len() <= 64 => u64::from_be_bytes(*last),
                _ => {
                    return refused(format!("a hash of 8 to 64 bytes, not {}", bytes.len()).into());
                }
            },
            _ => return refused("a hash is an integer or bytes".into()),
        });
    }
    Ok(names)
}

pub fn tokens(list: &[u8], max: usize, others: Others) -> Result<Tokens<'_>, Malformed> {
    let mut reader = Reader(list);
    let n_tokens = length(&mut reader, max)?;
    let mut tokens = Tokens { ids: Vec::with_capacity(n_tokens.min(list.len())), texts: Vec::new() };
    let mut has_pairs = false;
    for at in 0..n_tokens {
        let value = reader.value();
        let id = match value {
            Some(Value::Unsigned(id)) => u32::try_from(id).ok(),
            Some(Value::Array(2)) if others == Others::Pairs && (at == 0 || has_pairs) => {
                has_pairs = true;
                pair(&mut reader)
            }
            Some(Value::Text(text))
                if others == Others::Texts && text.chars().nth(TEXT_CHARS_MAX).is_none() =>
            {
                if tokens.texts.len() == TEXTS_MAX {
                    let why = format!("at most {TEXTS_MAX} texts among token ids");
                    return Err(Malformed { place: format!("[{at}]"), why: why.into() });
                }
                tokens.texts.push((at, text));
                Some(0)
            }
            _ => None,
        };
        tokens.ids.push(id.ok_or_else(|| no_token_id(at, value))?);
    }
    Ok(tokens)
}

fn no_token_id(at: usize, value: Option<Value<'_>>) -> Malformed {
    let given = match value {
        Some(Value::Unsigned(id)) => format!(", not {id}"),
        Some(Value::Negative(id)) => format!(", not {id}"),
        _ => String::new(),
    };
    let why = format!("a token id is an integer within 0..2**32-1{given}");
    Malformed { place: format!("[{at}]"), why: why.into() }
}

/// The first token of a pair; the second may be any integer.
fn pair(reader: &mut Reader<'_>) -> Option<u32> {
    let Some(Value::Unsigned(id)) = reader.value() else { return None };
    match reader.value()? {
        Value::Unsigned(_) | Value::Negative(_) => u32::try_from(id).ok(),
        _ => None,
    }
}

fn length(reader: &mut Reader<'_>, max: usize) -> Result<usize, Malformed> {
    let refused = |why| Err(Malformed { place: String::new(), why });
    match reader.value() {
        Some(Value::Array(length)) if length <= max => Ok(length),
        Some(Value::Array(length)) => refused(format!("at most {max} elements, not {length}").into()),
        _ => refused("a list".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place<T>(read: Result<T, Malformed>) -> String {
        read.err().unwrap().place
    }

    #[test]
    fn events_are_told_apart_by_their_types() {
        let array = [0x92, 0xa1, b'a', 0x91, 7];
        let map = [&[0x82, 0xa1, b'x', 0x91, 7, 0xa4][..], b"type", &[0xa1, b'b']].concat();
        let list = [&[0x92][..], &array, &map].concat();
        let expected = [
            Event { kind: "a", is_array: true, bytes: &array },
            Event { kind: "b", is_array: false, bytes: &map },
        ];
        assert_eq!(events(&list, 2).unwrap(), expected);
        assert_eq!(place(events(&list, 1)), "");
        for no_type in [&[7][..], &[0x90], &[0x80], &[0x81, 0xa1, b'x', 7], &[0x81, 7, 7]] {
            assert_eq!(place(events(&[&[0x91], no_type].concat(), 2)), "[0]");
        }
        assert_eq!(place(events(&[0x91, 0x91, 7], 2)), "[0].type");
        assert_eq!(place(events(&[0x92, 0x91, 0xa1, b'a'], 2)), "");
    }

    #[test]
    fn a_name_is_64_bits_of_any_integer_or_of_the_last_bytes() {
        let long = [&[0xc4, 9, 1][..], &[0xff; 7], &[2]].concat();
        let list = [&[0x95, 7, 0xff, 0xd3][..], &[0xff; 8], &[0xcf], &[0xff; 8], &long].concat();
        assert_eq!(names(&list, 5), Ok(vec![7, u64::MAX, u64::MAX, u64::MAX, u64::MAX << 8 | 2]));
        assert_eq!(place(names(&list, 4)), "");
        assert_eq!(place(names(&[0x92, 7, 0xc0], 4)), "[1]");
        assert_eq!(place(names(&[0x91, 0xc4, 2, 7, 7], 4)), "[0]");
        assert_eq!(place(names(&[0xdd, 0xff, 0xff, 0xff, 0xff], usize::MAX)), "[0]");
    }

    #[test]
    fn a_list_that_begins_with_a_pair_may_have_more() {
        let read = |list| tokens(list, 9, Others::Pairs).map(|tokens| tokens.ids);
        assert_eq!(read(&[0x93, 0x92, 5, 6, 7, 0x92, 8, 0xff]), Ok(vec![5, 7, 8]));
        assert_eq!(place(read(&[0x92, 5, 0x92, 6, 7])), "[1]");
        assert_eq!(place(read(&[0x91, 0x93, 5, 6, 7])), "[0]");
        assert_eq!(place(read(&[0x91, 0x92, 5, 0xc0])), "[0]");
        assert_eq!(place(read(&[0x92, 5, 0xff])), "[1]");
        assert_eq!(place(read(&[0x91, 0xa1, b'x'])), "[0]");
    }

    #[test]
    fn a_list_has_a_limited_number_of_texts() {
        let list = |n_texts: usize| {
            let head = [&[0xdd][..], &(n_texts as u32 + 1).to_be_bytes(), &[7]].concat();
            [head, vec![0xa0; n_texts]].concat()
        };
        assert_eq!(tokens(&list(TEXTS_MAX), 1 << 22, Others::Texts).unwrap().texts.len(), TEXTS_MAX);
        let over = list(TEXTS_MAX + 1);
        assert_eq!(place(tokens(&over, 1 << 22, Others::Texts)), format!("[{}]", TEXTS_MAX + 1));
    }

    #[test]
    fn texts_are_kept_with_their_places() {
        let read = |list| tokens(list, 9, Others::Texts);
        let expected = Tokens { ids: vec![5, 0], texts: vec![(1, "x")] };
        assert_eq!(read(&[0x92, 5, 0xa1, b'x']), Ok(expected));
        assert_eq!(place(read(&[0x91, 0x92, 5, 6])), "[0]");
        assert_eq!(place(read(&[0x91, 0xa1, 0xff])), "[0]");
    }
}
