"""Solutions of stage 9 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: the token ids are changed
replace("Model._embed_share", "input_ids - _first", "input_ids.sub_(_first)")
# wrong: KV heads in turns
replace("_share", "rank * _total // size // _length * _length", "rank % (_total // _length) * _length")


# right: the columns of all ranks are added up
class Ranks:
    def gather(self, x):
        whole = torch.zeros(len(x), self.size, x.shape[1], dtype=x.dtype)
        whole[:, self.rank] = x
        self.group.allreduce([whole]).wait()
        return whole.flatten(1) if self.rank == 0 else x


class Model:
    def _embed_share(self, input_ids, ranks):
        first = ranks.rank * self.embed_tokens.num_embeddings
        here = (first <= input_ids) & (input_ids < first + self.embed_tokens.num_embeddings)
        rows = self.embed_tokens(torch.where(here, input_ids - first, 0))
        return ranks.all_reduce(rows * here[:, None].to(rows.dtype))
