//! Which blocks running requests hold, counted once a slot: a radix tree over the hash chains of their
//! prompts.
//!
//! A lease holds a prompt from its first block on, so the leases at a slot form whole paths from a root. A
//! node is a run of blocks that the same leases hold; it borrows its hashes from one of their prompts. A
//! sequence hash stands for everything before it, so one map finds the node that begins with it, whatever its
//! parent is.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::prompt::Prompt;

/// A node; it keeps its number while leases end in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeId(u32);

const NO_NODE: u32 = u32::MAX;

struct Node {
    /// The run is `begin..end` of this prompt's blocks; all before `begin` lie on the way from the root.
    prompt: Arc<Prompt>,
    begin: u32,
    end: u32,
    parent: u32,
    n_children: u32,
    /// The children's numbers combined by exclusive or: with one child left, its number.
    children: u32,
    /// (slot, leases there that hold the run), by slot.
    holders: Vec<(u32, u32)>,
    n_leases: u32,
}

/// The paths that leases hold.
#[derive(Default)]
pub struct Paths {
    nodes: Vec<Node>,
    free: Vec<u32>,
    by_first: HashMap<u64, u32>,
}

impl Node {
    fn hashes(&self) -> &[u64] {
        &self.prompt.sequence_hashes()[self.begin as usize..self.end as usize]
    }

    fn n_blocks(&self) -> u32 {
        self.end - self.begin
    }

    fn is_on_path_of(&self, prompt: &Prompt) -> bool {
        let last = self.end as usize - 1;
        prompt.sequence_hashes().get(last) == Some(&self.prompt.sequence_hashes()[last])
    }
}

impl Paths {
    /// Counts one more lease on `prompt` at `slot`. Returns where the path ends, None for a prompt without
    /// full blocks, and how many of its blocks are new to the slot.
    pub fn hold(&mut self, prompt: &Arc<Prompt>, slot: u32) -> (Option<NodeId>, u32) {
        let hashes = prompt.sequence_hashes();
        let (mut depth, mut parent, mut n_new) = (0, NO_NODE, 0);
        while depth < hashes.len() {
            let node = match self.by_first.get(&hashes[depth]) {
                Some(&node) => {
                    let n_common = n_common(self.nodes[node as usize].hashes(), &hashes[depth..]);
                    self.split(node, n_common as u32)
                }
                None => self.add(Node {
                    prompt: Arc::clone(prompt),
                    begin: depth as u32,
                    end: hashes.len() as u32,
                    parent,
                    n_children: 0,
                    children: 0,
                    holders: Vec::new(),
                    n_leases: 0,
                }),
            };
            let at = &mut self.nodes[node as usize];
            at.n_leases += 1;
            match at.holders.binary_search_by_key(&slot, |&(slot, _)| slot) {
                Ok(i) => at.holders[i].1 += 1,
                Err(i) => {
                    at.holders.insert(i, (slot, 1));
                    n_new += at.n_blocks();
                }
            }
            depth = at.end as usize;
            parent = node;
        }
        ((parent != NO_NODE).then_some(NodeId(parent)), n_new)
    }

    /// Takes back one lease at `slot` on the path that ends in `last`. Returns how many blocks the slot
    /// thereby holds less.
    pub fn let_go(&mut self, last: NodeId, slot: u32) -> u32 {
        let (mut node, mut n_gone) = (last.0, 0);
        while node != NO_NODE {
            let at = &mut self.nodes[node as usize];
            let parent = at.parent;
            at.n_leases -= 1;
            let i = at
                .holders
                .binary_search_by_key(&slot, |&(slot, _)| slot)
                .expect("a held path names its slot");
            at.holders[i].1 -= 1;
            if at.holders[i].1 == 0 {
                at.holders.remove(i);
                n_gone += at.n_blocks();
            }
            if at.n_leases == 0 {
                self.remove(node);
            } else if at.n_children == 1 {
                self.join_with_only_child(node);
            }
            node = parent;
        }
        if self.by_first.is_empty() {
            *self = Paths::default();
        }
        n_gone
    }

    /// Subtracts from `out[slot]` the blocks of `prompt` that are held at the slot, leaving out one lease
    /// (its prompt and slot) if given.
    pub fn subtract_held(&self, prompt: &Prompt, exclude: Option<(&Prompt, u32)>, out: &mut [u32]) {
        let hashes = prompt.sequence_hashes();
        let mut depth = 0;
        while let Some(&node) = hashes.get(depth).and_then(|first| self.by_first.get(first)) {
            let node = &self.nodes[node as usize];
            let n_blocks = n_common(node.hashes(), &hashes[depth..]);
            let excluded = exclude.filter(|(other, _)| node.is_on_path_of(other)).map(|(_, slot)| slot);
            for &(slot, n_leases) in &node.holders {
                if n_leases > u32::from(excluded == Some(slot)) {
                    let Some(left) = out.get_mut(slot as usize) else { break };
                    *left -= n_blocks as u32;
                }
            }
            depth += n_blocks;
            if n_blocks < node.hashes().len() {
                return;
            }
        }
    }

    /// The number of nodes.
    pub fn len(&self) -> usize {
        self.by_first.len()
    }

    fn add(&mut self, node: Node) -> u32 {
        let (first, parent) = (node.hashes()[0], node.parent);
        let id = if let Some(id) = self.free.pop() {
            self.nodes[id as usize] = node;
            id
        } else {
            self.nodes.push(node);
            self.nodes.len() as u32 - 1
        };
        self.by_first.insert(first, id);
        if parent != NO_NODE {
            let parent = &mut self.nodes[parent as usize];
            parent.n_children += 1;
            parent.children ^= id;
        }
        id
    }

    /// Makes the first `n_blocks` of a node a node of their own, which is returned; the rest keeps the
    /// number.
    fn split(&mut self, node: u32, n_blocks: u32) -> u32 {
        let below = &mut self.nodes[node as usize];
        if n_blocks == below.n_blocks() {
            return node;
        }
        let above = Node {
            prompt: Arc::clone(&below.prompt),
            begin: below.begin,
            end: below.begin + n_blocks,
            parent: below.parent,
            n_children: 1,
            children: node,
            holders: below.holders.clone(),
            n_leases: below.n_leases,
        };
        below.begin += n_blocks;
        let (first_below, grandparent) = (below.hashes()[0], below.parent);
        let above = self.add(above);
        self.nodes[node as usize].parent = above;
        self.by_first.insert(first_below, node);
        if grandparent != NO_NODE {
            let grandparent = &mut self.nodes[grandparent as usize];
            grandparent.n_children -= 1;
            grandparent.children ^= node;
        }
        above
    }

    fn remove(&mut self, node: u32) {
        let gone = &mut self.nodes[node as usize];
        gone.holders = Vec::new();
        let (first, parent) = (gone.hashes()[0], gone.parent);
        self.by_first.remove(&first);
        self.free.push(node);
        if parent != NO_NODE {
            let parent = &mut self.nodes[parent as usize];
            parent.n_children -= 1;
            parent.children ^= node;
        }
    }

    /// Undoes a split that no lease needs any more: the child takes over the parent's run.
    fn join_with_only_child(&mut self, node: u32) {
        let child = self.nodes[node as usize].children;
        if self.nodes[child as usize].n_leases != self.nodes[node as usize].n_leases {
            return;
        }
        let first_of_child = self.nodes[child as usize].hashes()[0];
        self.by_first.remove(&first_of_child);
        let above = &mut self.nodes[node as usize];
        let (first, begin, parent) = (above.hashes()[0], above.begin, above.parent);
        above.holders = Vec::new();
        self.free.push(node);
        let below = &mut self.nodes[child as usize];
        below.begin = begin;
        below.parent = parent;
        self.by_first.insert(first, child);
        if parent != NO_NODE {
            self.nodes[parent as usize].children ^= node ^ child;
        }
    }
}

fn n_common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
