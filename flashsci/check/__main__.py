import sys

from flashsci.check import main

sys.exit(main())
