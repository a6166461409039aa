from dataclasses import dataclass
@dataclass(frozen=True)
class OwnershipLayout:
    rows: tuple
    @property
    def num_rows(self): return sum(self.rows)
    @property
    def offsets(self): return tuple(sum(self.rows[:i]) for i in range(len(self.rows)))
    def slice_of(self,o): return slice(self.offsets[o],self.offsets[o]+self.rows[o])
