"""Sources that yield batches, all of one shape: `mprun.data.source.Source` is their interface."""

from mprun.data.dataset_source import DatasetSource as DatasetSource
from mprun.data.image_store import load_digits as load_digits
from mprun.data.source import DataError as DataError
from mprun.data.source import permutation as permutation
from mprun.data.token_streams import TokenSource as TokenSource
