//! The sending thread in the engine's process: connects to the worker's door, sends, and reconnects.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::PoisonError;
use std::time::Duration;

use crate::address::Address;
use crate::frames::{self, Load, Reply};
use crate::mirror::Mirror;
use crate::publisher::{Shared, State};

/// How often an idle connection is asked whether it still is one.
const BEAT: Duration = Duration::from_secs(1);
/// A door that takes nothing, or does not answer, for this long is gone.
const SILENCE: Duration = Duration::from_secs(10);
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Frames are gathered up to about this size, then written at once.
const WRITE_BYTES: usize = 64 * 1024;

/// A connection to a door.
pub(crate) enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Socket {
    fn connect(address: &Address) -> io::Result<Self> {
        match address {
            Address::Unix(path) => {
                let socket = UnixStream::connect(path)?;
                socket.set_read_timeout(Some(SILENCE))?;
                socket.set_write_timeout(Some(SILENCE))?;
                Ok(Socket::Unix(socket))
            }
            Address::Tcp(place) => {
                let mut refused = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                for address in place.to_socket_addrs()? {
                    match TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
                        Ok(socket) => {
                            socket.set_nodelay(true)?;
                            socket.set_read_timeout(Some(SILENCE))?;
                            socket.set_write_timeout(Some(SILENCE))?;
                            return Ok(Socket::Tcp(socket));
                        }
                        Err(error) => refused = error,
                    }
                }
                Err(refused)
            }
        }
    }

    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Socket::Unix(socket) => Socket::Unix(socket.try_clone()?),
            Socket::Tcp(socket) => Socket::Tcp(socket.try_clone()?),
        })
    }

    /// Ends every read and write; errors of a connection that has ended already are ignored.
    pub fn shut(&self) {
        let (Ok(()) | Err(_)) = match self {
            Socket::Unix(socket) => socket.shutdown(Shutdown::Both),
            Socket::Tcp(socket) => socket.shutdown(Shutdown::Both),
        };
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(socket) => socket.read(into),
            Socket::Tcp(socket) => socket.read(into),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(socket) => socket.write(from),
            Socket::Tcp(socket) => socket.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What is next on a connection.
enum Step {
    Replace(u32, Mirror),
    Send { queue: Vec<u8>, loads: Vec<(u32, Load)>, reported: u64 },
    Close,
}

/// Why a connection is over, or was none.
struct Lost {
    why: String,
    /// The engine door refused the connection: an immediate retry would be refused too.
    refused: bool,
}

impl Lost {
    fn refused(why: &str) -> Self {
        Lost { why: format!("refused: {why}"), refused: true }
    }
}

impl From<io::Error> for Lost {
    fn from(error: io::Error) -> Self {
        let why = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the door closed the connection".to_owned(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "the door does not answer".to_owned(),
            _ => error.to_string(),
        };
        Lost { why, refused: false }
    }
}

/// Connects and sends until the publisher closes.
pub(crate) fn run(shared: &Shared) {
    mask_signals();
    let mut pause = PAUSE_MIN;
    while !shared.lock().closing {
        let ended = catch_unwind(AssertUnwindSafe(|| serve(shared)));
        let mistake = || Lost { why: "a mistake of the library's".to_owned(), refused: true };
        let lost = ended.unwrap_or_else(|_| Err(mistake())).err();
        let mut state = shared.lock();
        let was_heard = state.connected && lost.as_ref().is_some_and(|lost| !lost.refused);
        pause = if was_heard { PAUSE_MIN } else { (2 * pause).min(PAUSE_MAX) };
        state.leave(lost.map_or_else(String::new, |lost| lost.why));
        shared.progress.notify_all();
        // Work that arrives during the pause wakes the thread; it waits all the same, so as not to loop.
        let paused = shared.work.wait_timeout_while(state, pause, |state| !state.closing);
        drop(paused.unwrap_or_else(PoisonError::into_inner));
    }
}

/// One connection, from its greeting to its end.
fn serve(shared: &Shared) -> Result<(), Lost> {
    let settings = &shared.settings;
    let mut socket = Socket::connect(&settings.address)?;
    {
        let mut state = shared.lock();
        if state.closing {
            return Ok(());
        }
        state.socket = Some(socket.try_clone()?);
    }
    let mut greeting = Vec::new();
    frames::token(&mut greeting, &settings.token);
    frames::hello(&mut greeting, settings.block_size);
    // A door that refuses may close before it has read everything: its message is the reason, not the closing.
    let greeted = socket.write_all(&greeting);
    match frames::read_reply(&mut socket) {
        Ok(Reply::Welcome) => greeted?,
        Ok(Reply::Refused(why)) => return Err(Lost::refused(&why)),
        Ok(Reply::Synced(_)) => return Err(not_asked().into()),
        Err(error) => return Err(error.into()),
    }
    shared.lock().join();
    shared.progress.notify_all();
    loop {
        match next_step(shared) {
            Step::Replace(dp_rank, mirror) => {
                replace(&mut socket, dp_rank, &mirror).map_err(|error| last_words(&mut socket, error))?;
            }
            Step::Send { queue, loads, reported } => {
                send(&mut socket, queue, &loads, reported)?;
                shared.lock().arrived = reported;
                shared.progress.notify_all();
            }
            Step::Close => return Ok(()),
        }
    }
}

/// Ranks that must be sent whole come first, one at a time: a call waits for no more than one copy of a mirror.
fn next_step(shared: &Shared) -> Step {
    let mut state = shared.lock();
    let mut is_beat = false;
    loop {
        if state.closing {
            return Step::Close;
        }
        let State { ranks, counts, .. } = &mut *state;
        if let Some((&dp_rank, rank)) = ranks.iter_mut().find(|(_, rank)| rank.must_replace) {
            rank.must_replace = false;
            counts.replacements += 1;
            return Step::Replace(dp_rank, rank.mirror.clone());
        }
        if is_beat || state.reported != state.arrived {
            return state.take();
        }
        let waited = shared.work.wait_timeout(state, BEAT);
        let (back, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state = back;
        is_beat = timeout.timed_out();
    }
}

fn replace(socket: &mut Socket, dp_rank: u32, mirror: &Mirror) -> io::Result<()> {
    let mut out = Vec::with_capacity(2 * WRITE_BYTES);
    frames::replace(&mut out, dp_rank);
    mirror.replay(frames::FRAME_BLOCKS_MAX, |run| {
        frames::stored(&mut out, dp_rank, run.medium, run.parent, &run.engine_hashes, &run.block_hashes);
        if out.len() < WRITE_BYTES {
            return Ok(());
        }
        let written = socket.write_all(&out);
        out.clear();
        written
    })?;
    socket.write_all(&out)
}

/// Sends, and waits until the worker says that it took it.
fn send(socket: &mut Socket, mut queue: Vec<u8>, loads: &[(u32, Load)], reported: u64) -> Result<(), Lost> {
    for (dp_rank, load) in loads {
        frames::load(&mut queue, *dp_rank, load);
    }
    frames::sync(&mut queue, reported);
    socket.write_all(&queue).map_err(|error| last_words(socket, error))?;
    match frames::read_reply(socket)? {
        Reply::Synced(goal) if goal == reported => Ok(()),
        Reply::Refused(why) => Err(Lost::refused(&why)),
        _ => Err(not_asked().into()),
    }
}

/// The reason of the door's last message, if there is one, else that it closed the connection.
fn last_words(socket: &mut Socket, error: io::Error) -> Lost {
    if error.kind() == io::ErrorKind::BrokenPipe {
        if let Ok(Reply::Refused(why)) = frames::read_reply(socket) {
            return Lost::refused(&why);
        }
    }
    error.into()
}

fn not_asked() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the door answers what was not asked")
}

impl State {
    /// The door accepted the connection: it holds no blocks of this engine, whatever it held before.
    fn join(&mut self) {
        self.connected = true;
        self.arrived = 0;
        self.counts.connections += 1;
        self.error.clear();
        self.replace_all();
        for rank in self.ranks.values_mut() {
            rank.load_is_news = rank.load.is_some();
        }
    }

    fn leave(&mut self, why: String) {
        self.connected = false;
        self.socket = None;
        self.error = why;
        self.replace_all();
    }

    fn take(&mut self) -> Step {
        let mut loads = Vec::new();
        for (&dp_rank, rank) in &mut self.ranks {
            if std::mem::take(&mut rank.load_is_news) {
                loads.extend(rank.load.map(|load| (dp_rank, load)));
            }
        }
        self.queued_events = 0;
        Step::Send { queue: std::mem::take(&mut self.queue), loads, reported: self.reported }
    }
}

/// A write to a door that is gone must be an error here, not the signal that ends the engine; and the engine's
/// own signals are for the engine's threads.
fn mask_signals() {
    // SAFETY: the set is initialised before it is used, and only this thread's own mask changes.
    unsafe {
        let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(signals.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, signals.as_ptr(), std::ptr::null_mut());
    }
}
