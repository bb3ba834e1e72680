package netspec

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct{ text, kind, wrong string }{
		{"null", "null", ""},
		{"tap,name=tap0,mtu=9000,persist=on,rate=2.5", "tap", ""},
		{"sock,path=a=b", "sock", ""},
		{"", "", "kind is missing"},
		{",a=b", "", "kind is missing"},
		{"a=b", "", "starts with a parameter"},
		{"tap,", "", `parameter "" is not key=value`},
		{"tap,name", "", `parameter "name" is not key=value`},
		{"tap,=x", "", `parameter "=x" is not key=value`},
		{`user,publish="1:2,3",search=a`, "user", ""},
		{`user,search="a`, "", `quote of parameter "search" is not closed`},
		{`user,search="a"b`, "", `a comma is missing`},
	} {
		s, err := Parse(tc.text)
		if tc.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), tc.wrong) {
				t.Errorf("Parse(%q) error = %v, want it to contain %q", tc.text, err, tc.wrong)
			}
			continue
		}
		if err != nil || s.Kind != tc.kind {
			t.Errorf("Parse(%q) = %+v, %v", tc.text, s, err)
		}
	}
}

func TestGetters(t *testing.T) {
	s, err := Parse("x,name=a=b,n=7,rate=1e6,swap=off")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.String("name", ""); got != "a=b" {
		t.Errorf("String = %q", got)
	}
	if got := s.Int("n", 1, 0, 10); got != 7 {
		t.Errorf("Int = %d", got)
	}
	if got := s.Float("rate", 0, 0, 1e9); got != 1e6 {
		t.Errorf("Float = %g", got)
	}
	if s.Bool("swap", true) || !s.Bool("other", true) {
		t.Error("Bool: want off for swap and the default for other")
	}
	if got := s.Int("absent", 3, 0, 10); got != 3 {
		t.Errorf("absent Int = %d", got)
	}
	if err := s.Done(); err != nil {
		t.Error(err)
	}
}

func TestDuration(t *testing.T) {
	s, err := Parse("x,a=90s,b=1h,c=soon")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.Duration("a", time.Second, time.Second, time.Hour); got != 90*time.Second {
		t.Errorf("Duration = %v", got)
	}
	if got := s.Duration("absent", time.Second, time.Second, time.Hour); got != time.Second {
		t.Errorf("absent Duration = %v", got)
	}
	s.Duration("b", 0, time.Second, time.Minute)
	if err := s.Done(); err == nil || err.Error() != "network x: b=1h: accepted are durations from 1s to 1m0s, such as 300s" {
		t.Errorf("out of range: %v", err)
	}
}

func TestSub(t *testing.T) {
	s, err := Parse("x,up-b=2,up=tap,n=1,up-a=1,upper=3")
	if err != nil {
		t.Fatal(err)
	}
	sub := s.Sub("up")
	if sub == nil || sub.Kind != "tap" || sub.Text() != "tap,a=1,b=2" || sub.Int("a", 0, 0, 5) != 1 || s.Sub("other") != nil {
		t.Errorf("Sub = %+v", sub)
	}
	if err := sub.Done(); err == nil || !strings.Contains(err.Error(), `network tap: unknown parameter "up-b": accepted are up-a`) {
		t.Errorf("unknown parameter of the inner description: %v", err)
	}
	sub.Int("b", 0, 5, 6)
	if err := sub.Done(); err == nil || !strings.Contains(err.Error(), "network tap: up-b=2: accepted are") {
		t.Errorf("bad value in the inner description: %v", err)
	}
	s.Int("n", 0, 0, 5)
	s.Int("upper", 0, 0, 5)
	if err := s.Done(); err != nil {
		t.Error(err)
	}
}

func TestList(t *testing.T) {
	s, err := Parse(`x,deny=1,n=5,allow="2,3",z=1,deny=4`)
	if err != nil {
		t.Fatal(err)
	}
	got := s.List("allow", "deny")
	if want := []Param{{"deny", "1"}, {"allow", "2,3"}, {"deny", "4"}}; !slices.Equal(got, want) {
		t.Errorf("List = %v, want %v", got, want)
	}
	s.Int("n", 0, 0, 9)
	s.String("z", "")
	if err := s.Done(); err != nil {
		t.Error(err)
	}
	if want := `x,deny=1,allow="2,3",deny=4,n=5,z=1`; s.Text() != want {
		t.Errorf("Text = %s, want %s", s.Text(), want)
	}
}

func TestDone(t *testing.T) {
	read := func(s *Spec) {
		s.Int("n", 0, 0, 10)
		s.Float("rate", 0, 0, 10)
		s.Bool("swap", false)
	}
	for text, want := range map[string]string{
		"x,n=11":     "n=11: accepted are whole numbers from 0 to 10",
		"x,n=a":      "n=a: accepted are whole numbers",
		"x,rate=NaN": "rate=NaN: accepted are numbers from 0 to 10",
		"x,swap=yes": "swap=yes: accepted are on and off",
		"x,n=1,n=2":  `parameter "n" is given twice`,
		"x,bogus=1":  `unknown parameter "bogus": accepted are n, rate, swap`,
	} {
		s, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		read(s)
		if err := s.Done(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want it to contain %q", text, err, want)
		}
	}
	s, _ := Parse("null,a=b")
	if err := s.Done(); err == nil || !strings.Contains(err.Error(), "takes none") {
		t.Errorf("no parameters: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"null", "tap,name=tap0", "echo,swap=off", "source,size=64,rate=1e6", ",", "a=b", "x,y,z"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		s.Int("size", 0, 0, 9)
		s.Bool("swap", false)
		s.Float("rate", 0, 0, 1)
		_ = s.Done()
	})
}
