//! The pick of the slot with the lowest cost; of equal ones the request and their ranks choose.

use crate::hashing;

/// Why no slot is picked.
#[derive(Debug, PartialEq, Eq)]
pub enum NoPick {
    /// The cost of this slot is not a number.
    NotANumber(usize),
    /// No slot is allowed.
    NoneAllowed,
}

/// The costs of slots, of which those with a 0 in `allowed` do not count; None: all count.
#[derive(Clone, Copy)]
pub struct Costs<'a> {
    pub cost: &'a [f64],
    pub allowed: Option<&'a [u8]>,
}

/// The first slot of the lowest cost, and how many slots have that cost.
pub struct Lowest {
    pub slot: usize,
    pub n_equal: usize,
}

impl Costs<'_> {
    fn allows(&self, slot: usize) -> bool {
        self.allowed.is_none_or(|allowed| allowed[slot] != 0)
    }

    pub fn lowest(&self) -> Result<Lowest, NoPick> {
        let (mut best, mut lowest) = (f64::INFINITY, Lowest { slot: 0, n_equal: 0 });
        for (slot, &cost) in self.cost.iter().enumerate() {
            if cost > best || !self.allows(slot) {
                continue;
            }
            if cost == best && lowest.n_equal > 0 {
                lowest.n_equal += 1;
            } else if cost <= best {
                (best, lowest) = (cost, Lowest { slot, n_equal: 1 });
            } else {
                return Err(NoPick::NotANumber(slot));
            }
        }
        if lowest.n_equal == 0 {
            return Err(NoPick::NoneAllowed);
        }
        Ok(lowest)
    }

    /// The costs after `n` requests were added one by one to the cheapest slot, each of which adds `own_cost`.
    pub fn after(&self, n: usize, own_cost: f64) -> Result<Vec<f64>, NoPick> {
        let mut cost = self.cost.to_vec();
        for _ in 0..n {
            let slot = Costs { cost: &cost, allowed: self.allowed }.lowest()?.slot;
            cost[slot] += own_cost;
        }
        Ok(cost)
    }

    /// The slot among those as cheap as `first`, which is the first of them, that these bits choose.
    pub fn spread(&self, first: usize, rank_hash: &[u64], bits: u64) -> usize {
        (first..self.cost.len())
            .filter(|&slot| self.cost[slot] == self.cost[first] && self.allows(slot))
            .min_by_key(|&slot| mixed(rank_hash[slot] ^ bits))
            .unwrap_or(first)
    }
}

/// The bits of a request, to choose among equal slots: the same in every router.
pub fn request_bits(request_id: &str) -> u64 {
    hashing::mix64(u64::from(crc32fast::hash(request_id.as_bytes())))
}

fn mixed(bits: u64) -> u64 {
    let bits = bits.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ (bits >> 32)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowest(cost: &[f64], allowed: Option<&[u8]>) -> Result<(usize, usize), NoPick> {
        Costs { cost, allowed }.lowest().map(|lowest| (lowest.slot, lowest.n_equal))
    }

    #[test]
    fn the_first_of_the_lowest_is_found_among_those_allowed() {
        assert_eq!(lowest(&[3.0, 1.0, 2.0, 1.0], None), Ok((1, 2)));
        assert_eq!(lowest(&[3.0, 1.0, 2.0, 1.0], Some(&[1, 0, 1, 1])), Ok((3, 1)));
        assert_eq!(lowest(&[0.0, -0.0], None), Ok((0, 2)));
        let infinite = [f64::INFINITY; 3];
        assert_eq!(lowest(&infinite, Some(&[0, 1, 1])), Ok((1, 2)));
    }

    #[test]
    fn a_cost_that_is_not_a_number_counts_only_where_it_is_allowed() {
        assert_eq!(lowest(&[1.0, f64::NAN], Some(&[1, 0])), Ok((0, 1)));
        assert_eq!(lowest(&[1.0, f64::NAN], None), Err(NoPick::NotANumber(1)));
        assert_eq!(lowest(&[1.0], Some(&[0])), Err(NoPick::NoneAllowed));
        assert_eq!(lowest(&[], None), Err(NoPick::NoneAllowed));
    }

    #[test]
    fn unseen_requests_go_to_the_cheapest_slot_one_by_one() {
        let costs = Costs { cost: &[30.0, 10.0, 0.0, 20.0], allowed: Some(&[1, 1, 0, 1]) };
        assert_eq!(costs.after(3, 15.0), Ok(vec![30.0, 40.0, 0.0, 35.0]));
    }

    #[test]
    fn requests_choose_evenly_among_equal_slots_alone() {
        let costs = Costs { cost: &[1.0, 2.0, 1.0, 1.0, 1.0], allowed: Some(&[1, 1, 1, 0, 1]) };
        let rank_hash: Vec<u64> = (0..5).map(hashing::mix64).collect();
        let mut counts = [0; 5];
        for number in 0..3000 {
            counts[costs.spread(0, &rank_hash, request_bits(&format!("r{number}")))] += 1;
        }
        assert_eq!((counts[1], counts[3]), (0, 0));
        assert!([0, 2, 4].iter().all(|&slot| counts[slot] > 900), "{counts:?}");
    }
}
