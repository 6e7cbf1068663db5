import sys
from pathlib import Path

# planted_forms.py is imported by name here and in the proof's subprocess.
sys.path.insert(0, str(Path(__file__).parent))
