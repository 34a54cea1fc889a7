"""The public names of the package, which loads this module at the first use."""

from tilework.checkpoint.api import async_save, index_of, load, read, save
from tilework.checkpoint.asynchronous import PendingSave
from tilework.checkpoint.composing import PieceOf
from tilework.checkpoint.formats.converting import ConvertOptions, convert
from tilework.checkpoint.loading import LoadReport
from tilework.checkpoint.manager import CheckpointManager
from tilework.checkpoint.publishing import save_pretrained
from tilework.checkpoint.saving import SaveOptions
from tilework.checkpoint.showing import KeptCheckpoint, show
from tilework.checkpoint.stateful_objects import RandomState, Stateful
from tilework.checkpoint.storage import FileReader, FileWriter, Storage
from tilework.checkpoint.verifying import Difference, diff, verify
from tilework.errors import CheckpointError
