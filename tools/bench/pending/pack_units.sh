#!/bin/bash
# packs a tree with single units and FA3, without the library
tree=$1; out=/work/main/.scratch/next
rm -rf $out; mkdir -p $out/units $out/fa3
(cd $tree && git ls-files -co --exclude-standard -z | xargs -0 tar cf - --exclude=docs --exclude=reports --exclude=tests 2>/dev/null) | tar xf - -C $out
cp /work/wt/units/*.so $out/units/; cp /work/wt/fa3/_C90.so.xz /work/wt/fa3/libcudart.so.12 $out/fa3/
cp /work/notes/next/*.py /work/notes/next/*.sh $out/ 2>/dev/null
du -sh $out
