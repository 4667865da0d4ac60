//! The frames between an engine and the door of its worker: a length (u32, big-endian), then msgpack.
//!
//! The first frame is the token as it is. Every other one is an array whose first element is its kind; hash
//! columns are binary, 8 bytes a hash, little-endian. `src/kvrouter/worker/engine_door.py` is the other end.

use rmp::{decode, encode};
use std::io::{self, Read};

pub const VERSION: u64 = 1;

/// Blocks in one frame; a longer store is sent in several.
pub const FRAME_BLOCKS_MAX: usize = 4096;

const REPLY_BYTES_MAX: usize = 4096;

const HELLO: u64 = 0;
const REPLACE: u64 = 1;
const STORED: u64 = 2;
const REMOVED: u64 = 3;
const LOAD: u64 = 4;
const SYNC: u64 = 5;

const WELCOME: u64 = 0;
const REFUSED: u64 = 1;
const SYNCED: u64 = 2;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub active_blocks: u64,
    pub total_blocks: u64,
    pub active_prefill_tokens: u64,
    pub running_requests: u64,
    pub waiting_requests: u64,
}

/// A reply of the engine door.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    Welcome,
    Refused(String),
    Synced(u64),
}

pub fn token(out: &mut Vec<u8>, token: &str) {
    out.extend((token.len() as u32).to_be_bytes());
    out.extend(token.as_bytes());
}

pub fn hello(out: &mut Vec<u8>, block_size: usize) {
    frame(out, HELLO, 2, |out| {
        number(out, VERSION);
        number(out, block_size as u64);
    });
}

/// The rank holds nothing; what it holds comes next, from this connection alone.
pub fn replace(out: &mut Vec<u8>, dp_rank: u32) {
    frame(out, REPLACE, 1, |out| number(out, dp_rank.into()));
}

/// Consecutive blocks; in several frames, each after the last one's last block, when they are many.
pub fn stored(
    out: &mut Vec<u8>,
    dp_rank: u32,
    medium: usize,
    parent: Option<u64>,
    engine: &[u64],
    blocks: &[u64],
) {
    let mut parent = parent;
    for (engine, blocks) in engine.chunks(FRAME_BLOCKS_MAX).zip(blocks.chunks(FRAME_BLOCKS_MAX)) {
        frame(out, STORED, 5, |out| {
            number(out, dp_rank.into());
            number(out, medium as u64);
            match parent {
                Some(name) => number(out, name),
                None => written(encode::write_nil(out)),
            }
            column(out, engine);
            column(out, blocks);
        });
        parent = engine.last().copied();
    }
}

pub fn removed(out: &mut Vec<u8>, dp_rank: u32, medium: usize, engine: &[u64]) {
    for engine in engine.chunks(FRAME_BLOCKS_MAX) {
        frame(out, REMOVED, 3, |out| {
            number(out, dp_rank.into());
            number(out, medium as u64);
            column(out, engine);
        });
    }
}

pub fn load(out: &mut Vec<u8>, dp_rank: u32, load: &Load) {
    frame(out, LOAD, 6, |out| {
        number(out, dp_rank.into());
        number(out, load.active_blocks);
        number(out, load.total_blocks);
        number(out, load.active_prefill_tokens);
        number(out, load.running_requests);
        number(out, load.waiting_requests);
    });
}

/// Asks for [`Reply::Synced`] once everything before is taken.
pub fn sync(out: &mut Vec<u8>, goal: u64) {
    frame(out, SYNC, 1, |out| number(out, goal));
}

/// The next reply of the engine door. Errors when the connection ends, or the reply is unknown.
pub fn read_reply(from: &mut impl Read) -> io::Result<Reply> {
    let mut head = [0; 4];
    from.read_exact(&mut head)?;
    let n_bytes = u32::from_be_bytes(head) as usize;
    if n_bytes > REPLY_BYTES_MAX {
        return Err(odd("a reply is too long"));
    }
    let mut bytes = vec![0; n_bytes];
    from.read_exact(&mut bytes)?;
    parse(&mut bytes.as_slice()).ok_or_else(|| odd("a reply cannot be read"))
}

fn parse(from: &mut &[u8]) -> Option<Reply> {
    decode::read_array_len(from).ok().filter(|len| *len >= 1)?;
    match decode::read_int::<u64, _>(from).ok()? {
        WELCOME => Some(Reply::Welcome),
        REFUSED => {
            let n_bytes = decode::read_str_len(from).ok()? as usize;
            Some(Reply::Refused(String::from_utf8_lossy(from.get(..n_bytes)?).into_owned()))
        }
        SYNCED => Some(Reply::Synced(decode::read_int(from).ok()?)),
        _ => None,
    }
}

fn odd(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn frame(out: &mut Vec<u8>, kind: u64, fields: u32, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend([0; 4]);
    written(encode::write_array_len(out, fields + 1));
    number(out, kind);
    write(out);
    let n_bytes = (out.len() - start - 4) as u32;
    out[start..start + 4].copy_from_slice(&n_bytes.to_be_bytes());
}

fn number(out: &mut Vec<u8>, number: u64) {
    written(encode::write_uint(out, number));
}

fn column(out: &mut Vec<u8>, hashes: &[u64]) {
    written(encode::write_bin_len(out, (hashes.len() * 8) as u32));
    out.extend(hashes.iter().flat_map(|hash| hash.to_le_bytes()));
}

/// Writing to memory cannot fail; a panic here is caught at the C interface and returned as KVR_BUG.
fn written<T, E: std::fmt::Debug>(result: Result<T, E>) {
    result.expect("memory takes what is written to it");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_store_is_several_frames_that_follow_each_other() {
        let names: Vec<u64> = (0..FRAME_BLOCKS_MAX as u64 + 1).collect();
        let mut out = Vec::new();
        stored(&mut out, 0, 0, None, &names, &names);
        let first = u32::from_be_bytes(out[..4].try_into().unwrap()) as usize;
        let mut second = &out[4 + first + 4..];
        assert_eq!(decode::read_array_len(&mut second).unwrap(), 6);
        let fields: Vec<u64> = (0..4).map(|_| decode::read_int(&mut second).unwrap()).collect();
        assert_eq!(fields, [STORED, 0, 0, FRAME_BLOCKS_MAX as u64 - 1]);
        assert_eq!(decode::read_bin_len(&mut second).unwrap(), 8);
    }

    #[test]
    fn replies_are_read_and_nonsense_is_an_error() {
        let read = |bytes: &[u8]| {
            let mut framed = (bytes.len() as u32).to_be_bytes().to_vec();
            framed.extend(bytes);
            read_reply(&mut framed.as_slice())
        };
        assert_eq!(read(&[0x92, 0, 1]).unwrap(), Reply::Welcome);
        assert_eq!(read(&[0x92, 1, 0xa2, b'n', b'o']).unwrap(), Reply::Refused("no".into()));
        assert_eq!(read(&[0x92, 2, 7]).unwrap(), Reply::Synced(7));
        for nonsense in [&[][..], &[0x90], &[0x92, 9, 1], &[0x92, 1, 0xa9, b'n'], &[0xc0]] {
            assert!(read(nonsense).is_err());
        }
        assert!(read_reply(&mut &u32::MAX.to_be_bytes()[..]).is_err());
    }
}
