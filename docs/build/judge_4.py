"""Stage 4: the prefix cache, by hand; then random workloads."""

from __future__ import annotations

from beside import test_random_workloads  # noqa: F401
from pools import table

FIRST = "allocate A 1..5; compute A"
THREE = "allocate A 1; compute A; free A; allocate B 2; compute B; free B; allocate C 3; compute C; free C"
FAMILY = "allocate X 1 2 3 4 5 | Y 1 2 3 4 6 | Z 1 2 7 8 9"
test_a_case = table([
    ("keys_of", "A key is the SHA-256 hash of the key before, and the block's own tokens", "9 blocks of 2",
     "keys 1..5"),
    ("keys_of", "A token has 8 bytes", "9 blocks of 2", "keys 1 258 -1 1099511627776"),
    ("keys_of", "With a salt the first key begins with its hash, and the others do not", "9 blocks of 2",
     "keys 1..4 salt=1"),
    ("keys_of", "Each key follows from the one before it, also the hundredth, and is hashed once",
     "9 blocks of 2", "keys 1..200"),
    ("find_prefix", "A prefix ends at the first block that is missing", "9 blocks of 2",
     f"{FIRST}; find 1..5; find 1 2 9 4 5; find 3 4 5; find 1"),
    ("find_prefix", "The block of the last token is not looked up", "9 blocks of 2",
     f"{FIRST}; find 1..4; find 1..3; find 1 2"),
    ("find_prefix", "Without prefix caching nothing is found", "9 blocks of 2, uncached",
     "allocate A 1 2 3; compute A; find 1 2 3"),
    ("find_prefix", "A prompt to be scored is not looked up", "9 blocks of 2",
     f"{FIRST}; find 1..5 prompt_logprobs=1"),
    ("find_prefix", "All 100 blocks of a long prefix are found", "201 blocks of 2",
     "allocate A 1..200; compute A; find 1..201"),
    ("publish", "The blocks that the step fills get keys: 6 tokens computed, 7 scheduled", "9 blocks of 4",
     "allocate A 1..20; compute A 6; compute A 7; find 1..20"),
    ("publish", "Of two equal blocks the first one stays in `prefix_index`", "8 blocks of 2",
     "allocate A 1 2 3; allocate B 1 2 4; compute A; compute B"),
    ("publish", "Without prefix caching nothing is published", "8 blocks of 2, uncached",
     "allocate A 1 2 3; compute A"),
    ("take", "A free block goes before a cached one", "3 blocks of 1",
     "allocate A 1 2; compute A; free A; take x"),
    ("take", "The least recently used block is evicted, and loses its key", "3 blocks of 1",
     f"{THREE}; allocate D 1 9; free D; find 1 0; find 2 0; find 3 0; take x; take y"),
    ("allocate", "A prefix in use is shared, and counts as computed", "5 blocks of 2",
     f"{FIRST}; allocate B 1 2 3 4 6 7"),
    ("allocate", "A cached block is in use again", "4 blocks of 2", f"{FIRST}; free A; allocate B 1 2 9"),
    ("allocate", "A block that is found in use takes no free block", "3 blocks of 2",
     "allocate A 1 2 3; compute A; allocate B 1 2 4"),
    ("allocate", "A cached block that is found is free no longer", "3 blocks of 1",
     "allocate A 1 2 3; compute A; free A; allocate B 1 2 8 9; allocate C 1 2 8"),
    ("allocate", "All that is found is shared before a block is taken, which may evict", "3 blocks of 1",
     f"{THREE}; allocate D 1 5"),
    ("allocate", "A prompt to be scored finds nothing", "6 blocks of 2",
     "allocate A 1 2 3; compute A; allocate B 1 2 3 prompt_logprobs=1"),
    ("allocate", "num_reserved blocks stay free", "4 blocks of 2",
     "allocate A 1 2 3 num_reserved=3; allocate B 1 2 3 num_reserved=2"),
    ("allocate", "Salts keep prefixes apart", "8 blocks of 2",
     "allocate A 1 2 3 salt=7; compute A; allocate B 1 2 3; allocate C 1 2 4 salt=7"),
    ("allocate", "Siblings share the full blocks of their common prefixes", "6 blocks of 2", FAMILY),
    ("allocate", "They do without prefix caching, too", "6 blocks of 2, uncached", FAMILY),
    ("allocate", "The second and the third sibling share what the first one has not", "6 blocks of 2",
     "allocate A 1 2 3 4 5 | B 1 2 7 8 9 | C 1 2 7 8 5"),
    ("allocate", "The block of the last token is never shared, even if it is full", "6 blocks of 2",
     "allocate A 1..4 | B 1..4"),
    ("allocate", "Siblings that do not fit change nothing", "6 blocks of 2",
     f"allocate A 1 2 3; compute A; free A; allocate B 9; {FAMILY}"),
    ("allocate", "No sibling evicts what another one has found", "5 blocks of 1",
     "allocate A 1 2 3; compute A; free A; allocate B 1 8 | C 1 2 3 9"),
])  # fmt: skip
